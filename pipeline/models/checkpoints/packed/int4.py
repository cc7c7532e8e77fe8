"""INT4 in groups: `pack-quantized` of the library compressed-tensors, the format of Kimi K2's thinking models.

A matrix `name` [M, D] is stored as `name_packed` [M, D / 8], int32 with eight 4-bit numbers along D each, the first in
the lowest bits; `name_scale` [M, groups], a scale per group of consecutive numbers of a row; and `name_shape`, [M, D]
itself, which follows from the other two. Asymmetric ones have `name_zero_point` [M / 8, groups], with eight numbers
along M in a word.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from jaxtyping import Float, Float32, Int32

from pipeline.models.checkpoints.safetensors_file import FLOAT_DTYPES, TensorInfo

SUFFIXES = "_packed", "_scale", "_shape"
ZEROS = "_zero_point"  # the suffix of a fourth part, of asymmetric ones
PER_WORD = 8  # numbers

_NUMBERS = np.arange(16, dtype=np.float32) - 8
_PAIRS = np.stack([np.tile(_NUMBERS, 16), np.repeat(_NUMBERS, 16)], axis=1)  # by byte


def has_zeros(config: Mapping[str, object]) -> bool:
    """Whether a checkpoint with this config.json, which has been checked, is asymmetric."""
    quantization = config.get("quantization_config") or config["text_config"]["quantization_config"]
    return any(group["weights"].get("symmetric") is False for group in quantization["config_groups"].values())


def unpacked_info(packed: TensorInfo, scales: TensorInfo, zeros: TensorInfo | None = None) -> TensorInfo:
    """The dtype and shape of the unpacked tensor. If the parts do not match, the dtype describes them."""
    shape = (*packed.shape[:-1], packed.shape[-1] * PER_WORD) if packed.shape else ()
    is_known = packed.dtype == "I32" and scales.dtype in FLOAT_DTYPES and len(shape) == len(scales.shape) == 2
    if is_known and scales.shape[0] == shape[0] and scales.shape[1] and shape[1] % scales.shape[1] == 0:
        zeros_shape = (-(-shape[0] // PER_WORD), scales.shape[1])
        if zeros is None or (zeros.dtype, zeros.shape) == ("I32", zeros_shape):
            return replace(packed, dtype="F32", shape=shape)
    more = "" if zeros is None else f" and zeros {zeros.dtype} {list(zeros.shape)}"
    return replace(packed, dtype=f"{packed.dtype} with scales {scales.dtype} {list(scales.shape)}{more}", shape=shape)


def unpacked(
    packed: Int32[np.ndarray, "rows words"],
    scales: Float[np.ndarray, "rows groups"],
    zeros: Float32[np.ndarray, "rows groups"] | None = None,
) -> Float32[np.ndarray, "rows D"]:
    """The float32 values of consecutive rows."""
    values = _PAIRS[packed.view(np.uint8)].reshape(*scales.shape, -1)
    if zeros is not None:
        values -= zeros[..., None]
    values *= scales.astype(np.float32)[..., None]
    return values.reshape(len(packed), -1)


def unpacked_zeros(
    words: Int32[np.ndarray, "words groups"], start: int, stop: int
) -> Float32[np.ndarray, "rows groups"]:
    """The zeros of consecutive rows, the first being row `start`. `words` are those that contain these rows."""
    numbers = (words[:, None] >> (4 * np.arange(PER_WORD)[:, None])) & 15
    first = start % PER_WORD
    return _NUMBERS[numbers.reshape(-1, words.shape[1])[first : first + stop - start]]
