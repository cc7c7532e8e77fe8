"""MXFP4 (Open Compute Project, Microscaling Formats 1.0): blocks of 32 4-bit numbers, with a scale per block.

In gpt-oss, a tensor `name` [E, D, M] is stored as two tensors of bytes: `name_blocks` [E, M, D / 32, 16] has pairs of
numbers along D, the first in the lower bits, and `name_scales` [E, M, D / 32] has the exponents.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Float32

from pipeline.models.checkpoints.packed.packing import Packing, QuantizationConfig, Read
from pipeline.models.checkpoints.safetensors_file import TensorInfo

_PAIR_BYTES = 16  # per block

_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_NUMBERS = np.concatenate([_POSITIVE, -_POSITIVE])
_PAIRS = np.stack([np.tile(_NUMBERS, 16), np.repeat(_NUMBERS, 16)], axis=1)  # by byte
_SCALES = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))


class Mxfp4(Packing):
    suffixes = "_blocks", "_scales"

    def __init__(self, config: QuantizationConfig) -> None:
        """Its attributes do not change the values."""

    def info(self, blocks: TensorInfo, scales: TensorInfo) -> TensorInfo:
        if (blocks.dtype, *blocks.shape[3:]) != ("U8", _PAIR_BYTES):
            return blocks
        if (scales.dtype, scales.shape) != ("U8", blocks.shape[:3]):
            return scales
        experts, outputs, num_blocks, _ = blocks.shape
        return replace(blocks, dtype="F32", shape=(experts, num_blocks * 2 * _PAIR_BYTES, outputs))

    def rows(self, read: Read, parts: tuple[str, ...], start: int, stop: int) -> Float32[np.ndarray, "E D M"]:
        blocks, scales = (read(part, start, stop) for part in parts)  # [E, M, D / 32, 16], [E, M, D / 32]
        values: Float32[np.ndarray, "E M blocks 16 2"] = _PAIRS[blocks]
        values *= _SCALES[scales][..., None, None]
        return values.reshape(*blocks.shape[:2], -1).transpose(0, 2, 1)
