"""4-bit numbers of two formats that store a matrix transposed: GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978).

A matrix `name.weight` [M, D] has `name.scales` [groups, M] and int32 words of eight 4-bit numbers: `name.qzeros`
[groups, M / 8], along M, and `name.qweight`, in GPTQ [D / 8, M], along D, in AWQ [D, M / 8], along M. In AWQ, a word's
numbers are in the order 0, 2, 4, 6, 1, 3, 5, 7. GPTQ may have `name.g_idx` [D], the group of each input; otherwise a
group is consecutive inputs. weight = (number - zero) * scale. GPTQ stores zeros minus 1, except as `gptq_v2`.
"""

from collections import defaultdict
from dataclasses import replace
from functools import lru_cache
from threading import Lock

import numpy as np
from jaxtyping import Float32, Int32, UInt8

from pipeline.core.errors import CheckpointError
from pipeline.models.checkpoints.packed.packing import Packing, QuantizationConfig, Read
from pipeline.models.checkpoints.safetensors_file import FLOAT_DTYPES, TensorInfo

_PER_WORD = 8  # numbers
_AWQ_SHIFTS = 4 * np.array([0, 4, 1, 5, 2, 6, 3, 7])  # of a word's numbers, in their order
_GPTQ_SHIFTS = 4 * np.arange(_PER_WORD)
_AWQ = {"bits": 4, "zero_point": True}
_GPTQ = {"bits": 4, "pack_dtype": "int32", "is_marlin_format": False, "lm_head": False, "dynamic": {}}
_UNUSED = (  # attributes of kernels and of the calibration; with `desc_act`, the order of columns is in the weights
    *("backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment", "damp_percent"),
    *("dataset", "desc_act", "disable_exllama", "do_fuse", "exllama_config", "fuse_max_seq_len", "group_size"),
    *("max_input_length", "meta", "model_file_base_name", "model_name_or_path", "model_seqlen", "static_groups", "sym"),
    *("module_name_preceding_first_block", "modules_in_block_to_quantize", "modules_to_fuse", "pad_token_id"),
    *("modules_to_not_convert", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama"),
)


class Columns(Packing):
    suffixes, optional, ending = (".qweight", ".qzeros", ".scales"), (".g_idx",), ".weight"

    def __init__(self, config: QuantizationConfig) -> None:
        """Of AWQ, the layout of AutoAWQ's `gemm` with zeros."""
        self._is_awq, self._where = config.choice("quant_method", ("awq", "gptq")) == "awq", config.where
        self._zero_offset = 0  # added to stored zeros
        config.require(_AWQ if self._is_awq else _GPTQ)
        if self._is_awq:
            config.choice("version", ("gemm", "GEMM"), "gemm")
        else:
            self._zero_offset = int(config.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq")
        config.ignore(*_UNUSED)
        config.finish()
        self._whole = lru_cache(maxsize=4)(self._read_whole)  # four leaves are loaded at a time
        self._locks: dict[tuple[str, ...], Lock] = defaultdict(Lock)  # several threads need a matrix, but one reads it

    def info(self, words: TensorInfo, zeros: TensorInfo, scales: TensorInfo, *groups: TensorInfo) -> TensorInfo:
        parts = (words, zeros, scales, *groups)
        described = ", ".join(f"{info.dtype} {list(info.shape)}" for info in parts[1:])
        unknown = replace(words, dtype=f"{words.dtype} {list(words.shape)} with {described}")
        if any(len(info.shape) != 2 for info in parts[:3]):
            return unknown
        inputs, outputs = words.shape[0], words.shape[1] * _PER_WORD
        if not self._is_awq:
            inputs, outputs = words.shape[0] * _PER_WORD, words.shape[1]
        num_groups = scales.shape[0]
        shapes = [(num_groups, outputs // _PER_WORD), (num_groups, outputs), (inputs,)]
        are_words = scales.dtype in FLOAT_DTYPES and all(info.dtype == "I32" for info in (words, zeros, *groups))
        has_groups = num_groups > 0 and (groups or inputs % num_groups == 0)
        is_known = are_words and has_groups and [info.shape for info in parts[1:]] == shapes[: len(parts) - 1]
        return replace(words, dtype="F32" if is_known else unknown.dtype, shape=(outputs, inputs))

    def rows(self, read: Read, parts: tuple[str, ...], start: int, stop: int) -> Float32[np.ndarray, "M D"]:
        """From the whole parts, in which these rows are columns."""
        with self._locks[parts]:
            words, zeros, scales, *groups = self._whole(read, parts)
        columns = slice(start, stop)
        numbers = self._along_outputs(words, columns) if self._is_awq else _along_inputs(words[:, columns])
        zeros = (self._along_outputs(zeros, columns) + self._zero_offset) & 15
        group_of = groups[0] if groups else np.repeat(np.arange(len(scales)), len(numbers) // len(scales))
        values = numbers.astype(np.float32)
        values -= zeros[group_of]
        values *= scales[:, columns].astype(np.float32)[group_of]
        return values.T

    def _read_whole(self, read: Read, names: tuple[str, ...]) -> list[np.ndarray]:
        parts = [read(name) for name in names]
        _, _, scales, *groups = parts
        if groups and not 0 <= groups[0].min() <= groups[0].max() < len(scales):
            raise CheckpointError(
                f"{self._where}: {names[-1]} has numbers from {groups[0].min()} to {groups[0].max()}, expected groups "
                f"from 0 to {len(scales) - 1}. Download the checkpoint again."
            )
        return parts

    def _along_outputs(self, words: Int32[np.ndarray, "rows words"], columns: slice) -> UInt8[np.ndarray, "rows M"]:
        first = columns.start // _PER_WORD
        words = words[:, first : -(-columns.stop // _PER_WORD), None]
        numbers = (words >> (_AWQ_SHIFTS if self._is_awq else _GPTQ_SHIFTS)).astype(np.uint8) & 15
        skipped = first * _PER_WORD
        return numbers.reshape(len(words), -1)[:, columns.start - skipped : columns.stop - skipped]


def _along_inputs(words: Int32[np.ndarray, "words M"]) -> UInt8[np.ndarray, "D M"]:
    numbers = (words[:, None] >> _GPTQ_SHIFTS[:, None]).astype(np.uint8) & 15
    return numbers.reshape(-1, words.shape[1])
