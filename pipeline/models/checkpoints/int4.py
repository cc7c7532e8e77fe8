"""INT4 in groups, the format of Kimi K2's thinking models: `pack-quantized` of the library compressed-tensors.

A matrix `name` [M, D] is stored as `name_packed` [M, D / 8], int32 with eight 4-bit numbers along D each, the first in
the lowest bits; `name_scale` [M, groups], a scale per group of consecutive numbers of a row; and `name_shape`, [M, D]
itself, which follows from the other two.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Float, Float32, Int32

from pipeline.models.checkpoints.safetensors_file import FLOAT_DTYPES, TensorInfo

SUFFIXES = "_packed", "_scale", "_shape"
_PER_WORD = 8  # numbers

_NUMBERS = np.arange(16, dtype=np.float32) - 8
_PAIRS = np.stack([np.tile(_NUMBERS, 16), np.repeat(_NUMBERS, 16)], axis=1)  # by byte


def unpacked_info(packed: TensorInfo, scales: TensorInfo) -> TensorInfo:
    """The dtype and shape of the unpacked tensor. If numbers and scales do not match, the dtype describes both."""
    shape = (*packed.shape[:-1], packed.shape[-1] * _PER_WORD) if packed.shape else ()
    is_known = packed.dtype == "I32" and scales.dtype in FLOAT_DTYPES and len(shape) == len(scales.shape) == 2
    if is_known and scales.shape[0] == shape[0] and scales.shape[1] and shape[1] % scales.shape[1] == 0:
        return replace(packed, dtype="F32", shape=shape)
    return replace(packed, dtype=f"{packed.dtype} with scales {scales.dtype} {list(scales.shape)}", shape=shape)


def unpacked(
    packed: Int32[np.ndarray, "rows words"], scales: Float[np.ndarray, "rows groups"]
) -> Float32[np.ndarray, "rows D"]:
    """The float32 values of consecutive rows."""
    values = _PAIRS[packed.view(np.uint8)].reshape(*scales.shape, -1)
    values *= scales.astype(np.float32)[..., None]
    return values.reshape(len(packed), -1)
