"""4-bit numbers of two formats that store a matrix transposed: GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978).

A matrix `name.weight` [M, D] has `name.scales` [groups, M] and int32 words of eight 4-bit numbers: `name.qzeros`
[groups, M / 8], along M, and `name.qweight`, in GPTQ [D / 8, M], along D, in AWQ [D, M / 8], along M. In AWQ, a word's
numbers are in the order 0, 2, 4, 6, 1, 3, 5, 7. GPTQ may have `name.g_idx` [D], the group of each input; otherwise a
group is consecutive inputs. weight = (number - zero) * scale. GPTQ stores zeros minus 1, except as `gptq_v2`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from jaxtyping import Float32, Int32, UInt8

from pipeline.models.checkpoints.safetensors_file import FLOAT_DTYPES, TensorInfo

SUFFIXES = ".qweight", ".qzeros", ".scales"
GROUPS = ".g_idx"
_PER_WORD = 8  # numbers
_AWQ_SHIFTS = 4 * np.array([0, 4, 1, 5, 2, 6, 3, 7])  # of a word's numbers, in their order
_GPTQ_SHIFTS = 4 * np.arange(_PER_WORD)


@dataclass(frozen=True)
class ColumnFormat:
    """How a checkpoint stores its matrices."""

    is_awq: bool
    zero_offset: int  # added to stored zeros

    @classmethod
    def of(cls, config: Mapping[str, object]) -> Self | None:
        """The format of a checkpoint with this config.json; None if it has neither."""
        quantization = config.get("quantization_config")
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        if method not in ("awq", "gptq"):
            return None
        has_offset = method == "gptq" and quantization.get("checkpoint_format") != "gptq_v2"
        return cls(method == "awq", int(has_offset))

    def unpacked_info(
        self, words: TensorInfo, zeros: TensorInfo, scales: TensorInfo, *groups: TensorInfo
    ) -> TensorInfo:
        """The dtype and shape of the unpacked tensor. If the parts do not match, the dtype describes them."""
        parts = (words, zeros, scales, *groups)
        dtypes = [info.dtype for info in parts]
        described = ", ".join(f"{info.dtype} {list(info.shape)}" for info in parts[1:])
        unknown = replace(words, dtype=f"{words.dtype} {list(words.shape)} with {described}")
        if any(len(info.shape) != 2 for info in parts[:3]):
            return unknown
        inputs, outputs = words.shape[0], words.shape[1] * _PER_WORD
        if not self.is_awq:
            inputs, outputs = words.shape[0] * _PER_WORD, words.shape[1]
        num_groups = scales.shape[0]
        shapes = [(num_groups, outputs // _PER_WORD), (num_groups, outputs), (inputs,)]
        has_dtypes = dtypes[:2] == ["I32"] * 2 and scales.dtype in FLOAT_DTYPES and dtypes[3:] in ([], ["I32"])
        has_groups = num_groups > 0 and (groups or inputs % num_groups == 0)
        is_known = has_dtypes and has_groups and [info.shape for info in parts[1:]] == shapes[: len(parts) - 1]
        return replace(words if is_known else unknown, shape=(outputs, inputs), **{"dtype": "F32"} if is_known else {})

    def unpacked(self, parts: Sequence[np.ndarray], start: int, stop: int) -> Float32[np.ndarray, "M D"]:
        """The float32 values of rows start..stop-1 of the matrix, from its whole parts."""
        words, zeros, scales, *groups = parts
        columns = slice(start, stop)
        numbers = self._along_outputs(words, columns) if self.is_awq else _along_inputs(words[:, columns])
        zeros = (self._along_outputs(zeros, columns) + self.zero_offset) & 15
        group_of = groups[0] if groups else np.repeat(np.arange(len(scales)), len(numbers) // len(scales))
        values = numbers.astype(np.float32)
        values -= zeros[group_of]
        values *= scales[:, columns].astype(np.float32)[group_of]
        return values.T

    def _along_outputs(self, words: Int32[np.ndarray, "rows words"], columns: slice) -> UInt8[np.ndarray, "rows M"]:
        first = columns.start // _PER_WORD
        words = words[:, first : -(-columns.stop // _PER_WORD), None]
        numbers = (words >> (_AWQ_SHIFTS if self.is_awq else _GPTQ_SHIFTS)).astype(np.uint8) & 15
        skipped = first * _PER_WORD
        return numbers.reshape(len(words), -1)[:, columns.start - skipped : columns.stop - skipped]


def _along_inputs(words: Int32[np.ndarray, "words M"]) -> UInt8[np.ndarray, "D M"]:
    numbers = (words[:, None] >> _GPTQ_SHIFTS[:, None]).astype(np.uint8) & 15
    return numbers.reshape(-1, words.shape[1])
