"""INT4 in groups: `pack-quantized` of the library compressed-tensors, the format of Kimi K2's thinking models.

A matrix `name` [M, D] is stored as `name_packed` [M, D / 8], int32 with eight 4-bit numbers along D each, the first in
the lowest bits; `name_scale` [M, groups], a scale per group of consecutive numbers of a row; and `name_shape`, [M, D]
itself, which follows from the other two. Asymmetric ones have `name_zero_point` [M / 8, groups], with eight numbers
along M in a word.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Float, Float32, Int32

from pipeline.models.checkpoints.packed.packing import Packing, QuantizationConfig, Read
from pipeline.models.checkpoints.safetensors_file import FLOAT_DTYPES, TensorInfo

_PER_WORD = 8  # numbers
_NUMBERS = np.arange(16, dtype=np.float32) - 8
_PAIRS = np.stack([np.tile(_NUMBERS, 16), np.repeat(_NUMBERS, 16)], axis=1)  # by byte


class Int4(Packing):
    suffixes = "_packed", "_scale", "_shape"

    def __init__(self, config: QuantizationConfig) -> None:
        """The scales must be of groups of a row, or of rows; activations must not be quantised."""
        config.choice("format", ("pack-quantized",))
        config.require({"sparsity_config": {}, "transform_config": {}})
        config.ignore("quant_method", "ignore", "quantization_status", "global_compression_ratio", "version")
        groups = config.nested("config_groups")
        for name in groups.values:
            group = groups.nested(name)
            group.ignore("targets")
            group.choice("format", ("pack-quantized",), "pack-quantized")
            weights = group.nested("weights")
            weights.require({"num_bits": 4, "type": "int", "dynamic": False})
            weights.choice("strategy", ("group", "channel"))
            weights.choice("actorder", ("static", "weight"), "static")  # columns keep their order
            if not weights.flag("symmetric", True):
                self.suffixes = *Int4.suffixes, "_zero_point"
            weights.ignore("group_size", "observer", "observer_kwargs", "block_structure", "scale_dtype", "zp_dtype")
            weights.finish()
            group.finish()
        config.finish()

    def info(self, packed: TensorInfo, scales: TensorInfo, _shape: TensorInfo, *zeros: TensorInfo) -> TensorInfo:
        shape = (*packed.shape[:-1], packed.shape[-1] * _PER_WORD) if packed.shape else ()
        is_known = packed.dtype == "I32" and scales.dtype in FLOAT_DTYPES and len(shape) == len(scales.shape) == 2
        if is_known and scales.shape[0] == shape[0] and scales.shape[1] and shape[1] % scales.shape[1] == 0:
            zeros_shape = (-(-shape[0] // _PER_WORD), scales.shape[1])
            if all((info.dtype, info.shape) == ("I32", zeros_shape) for info in zeros):
                return replace(packed, dtype="F32", shape=shape)
        more = "".join(f" and zeros {info.dtype} {list(info.shape)}" for info in zeros)
        return replace(
            packed, dtype=f"{packed.dtype} with scales {scales.dtype} {list(scales.shape)}{more}", shape=shape
        )

    def rows(self, read: Read, parts: tuple[str, ...], start: int, stop: int) -> Float32[np.ndarray, "M D"]:
        packed, scales = (read(part, start, stop) for part in parts[:2])
        zeros = None
        for part in parts[3:]:
            words = read(part, start // _PER_WORD, -(-stop // _PER_WORD))
            zeros = _unpacked_zeros(words)[start % _PER_WORD :][: stop - start]
        return unpacked(packed, scales, zeros)


def unpacked(
    packed: Int32[np.ndarray, "rows words"],
    scales: Float[np.ndarray, "rows groups"],
    zeros: Float32[np.ndarray, "rows groups"] | None = None,
) -> Float32[np.ndarray, "rows D"]:
    """The float32 values of rows."""
    values = _PAIRS[packed.view(np.uint8)].reshape(*scales.shape, -1)
    if zeros is not None:
        values -= zeros[..., None]
    values *= scales.astype(np.float32)[..., None]
    return values.reshape(len(packed), -1)


def _unpacked_zeros(words: Int32[np.ndarray, "words groups"]) -> Float32[np.ndarray, "rows groups"]:
    numbers = (words[:, None] >> (4 * np.arange(_PER_WORD)[:, None])) & 15
    return _NUMBERS[numbers.reshape(-1, words.shape[1])]
