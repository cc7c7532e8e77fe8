"""FP8 in blocks, the format of DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) and Qwen3's FP8 models.

A matrix `name` [M, D] has 8-bit numbers (e4m3). `name_scale_inv` [ceil(M / rows), ceil(D / columns)] has a scale per
block of [rows, columns] numbers; blocks at the end may be smaller.
"""

from collections.abc import Mapping
from dataclasses import replace

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32

from pipeline.models.checkpoints.safetensors_file import FLOAT_DTYPES, TensorInfo

SUFFIXES = "", "_scale_inv"
_NUMBERS = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def block_shape(config: Mapping[str, object]) -> tuple[int, int] | None:
    """The rows and columns of a block, from config.json; None if the weights are not in FP8."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "fp8":
        return None
    rows, columns = quantization["weight_block_size"]
    return rows, columns


def unpacked_info(numbers: TensorInfo, scales: TensorInfo, block: tuple[int, int]) -> TensorInfo:
    """The dtype and shape of the unpacked tensor. If numbers and scales do not match, the dtype describes both."""
    num_blocks = tuple(-(-size // part) for size, part in zip(numbers.shape, block, strict=False))
    is_known = numbers.dtype == "F8_E4M3" and scales.dtype in FLOAT_DTYPES
    if is_known and len(numbers.shape) == 2 and scales.shape == num_blocks:
        return replace(numbers, dtype="F32")
    return replace(numbers, dtype=f"{numbers.dtype} with scales {scales.dtype} {list(scales.shape)}")


def unpacked(
    numbers: np.ndarray, scales: Float[np.ndarray, "blocks columns"], start: int, block: tuple[int, int]
) -> Float32[np.ndarray, "rows D"]:
    """The float32 values of consecutive rows, the first being row `start`. `scales` are those of the blocks that
    contain these rows."""
    values = _NUMBERS[numbers.view(np.uint8)]
    column_scales = np.repeat(scales.astype(np.float32), block[1], axis=1)[:, : values.shape[1]]
    first = -(start % block[0])  # the start of the first block
    for number, row_scales in enumerate(column_scales):
        stop = first + (number + 1) * block[0]
        values[max(stop - block[0], 0) : stop] *= row_scales
    return values
