"""FP8 in blocks, the format of DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) and Qwen3's FP8 models.

A matrix `name` [M, D] has 8-bit numbers (e4m3). `name_scale_inv` [ceil(M / rows), ceil(D / columns)] has a scale per
block of [rows, columns] numbers; blocks at the end may be smaller.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np
from jaxtyping import Float32

from pipeline.core.errors import CheckpointError
from pipeline.core.messages import shown
from pipeline.models.checkpoints.packed.packing import Packing, QuantizationConfig, Read
from pipeline.models.checkpoints.safetensors_file import FLOAT_DTYPES, TensorInfo

_NUMBERS = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


class Fp8(Packing):
    suffixes = "", "_scale_inv"

    def __init__(self, config: QuantizationConfig) -> None:
        """Activations must not be quantised."""
        block = config.whole_numbers("weight_block_size")
        if len(block) != 2 or min(block) < 1:
            raise CheckpointError(
                f"{config.where}: weight_block_size is {shown(block or None)}, expected two whole numbers above 0: "
                f"other kinds of FP8 are not implemented. Use another {config.user}."
            )
        self._block = tuple(block)
        config.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")  # two names of one format
        config.choice("activation_scheme", ("dynamic",), "dynamic")
        config.choice("scale_fmt", ("float", "ue8m0"), "float")  # the scales are stored as floats either way
        config.ignore("quant_method", "modules_to_not_convert", "ignored_layers")  # visible from the tensors' dtypes
        config.finish()

    def info(self, numbers: TensorInfo, scales: TensorInfo) -> TensorInfo:
        num_blocks = tuple(-(-size // part) for size, part in zip(numbers.shape, self._block, strict=False))
        is_known = numbers.dtype == "F8_E4M3" and scales.dtype in FLOAT_DTYPES
        if is_known and len(numbers.shape) == 2 and scales.shape == num_blocks:
            return replace(numbers, dtype="F32")
        return replace(numbers, dtype=f"{numbers.dtype} with scales {scales.dtype} {list(scales.shape)}")

    def rows(self, read: Read, parts: tuple[str, ...], start: int, stop: int) -> Float32[np.ndarray, "M D"]:
        rows, columns = self._block
        values = _NUMBERS[read(parts[0], start, stop).view(np.uint8)]
        scales = read(parts[1], start // rows, -(-stop // rows)).astype(np.float32)  # of the blocks with these rows
        column_scales = np.repeat(scales, columns, axis=1)[:, : values.shape[1]]
        first = -(start % rows)  # the start of the first block
        for number, row_scales in enumerate(column_scales):
            end = first + (number + 1) * rows
            values[max(end - rows, 0) : end] *= row_scales
        return values
