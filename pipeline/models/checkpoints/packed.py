"""Formats in which checkpoints pack numbers of 4 and 8 bits, and the choice of one by config.json.

A matrix is several tensors in the file, its parts. It is unpacked to float32, by rows.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from threading import Lock
from typing import ClassVar

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Int32, UInt8

from pipeline.core.errors import CheckpointError
from pipeline.core.messages import shown
from pipeline.models.checkpoints.json_config import JsonConfig
from pipeline.models.checkpoints.safetensors_file import FLOAT_DTYPES, TensorInfo

Read = Callable[..., np.ndarray]
"""Reads rows of a tensor in the file: `read(name, start, stop)`, or all of them: `read(name)`."""

Shape = tuple[int, ...]

_PER_WORD = 8  # 4-bit numbers in an int32


class Packing(ABC):
    """A format. Its constructor reads the `quantization_config`, and raises CheckpointError for values that are not
    implemented."""

    suffixes: ClassVar[tuple[str, ...]]  # of the names of a matrix' parts
    optional: ClassVar[tuple[str, ...]] = ()  # suffixes of parts that may be missing
    ending: ClassVar[str] = ""  # of the matrix' name, in place of these suffixes

    def parts(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Matrix -> the names of its parts, if all of them are among `names`, those of the file's tensors."""
        last, found = self.suffixes[-1], {}
        for start in (name.removesuffix(last) for name in names if name.endswith(last)):
            if all(start + suffix in names for suffix in self.suffixes):
                optional = [suffix for suffix in self.optional if start + suffix in names]
                found[start + self.ending] = tuple(start + suffix for suffix in (*self.suffixes, *optional))
        return found

    def info(self, *parts: TensorInfo) -> TensorInfo:
        """The matrix' shape, and float32 as its dtype. If the parts do not match, they are its dtype in messages."""
        shape = self._shape(*parts)
        if shape is not None:
            return replace(parts[0], dtype="F32", shape=shape)
        return replace(parts[0], dtype=" with ".join(f"{part.dtype} {list(part.shape)}" for part in parts))

    @abstractmethod
    def _shape(self, *parts: TensorInfo) -> Shape | None:
        """The matrix' shape; None if the parts do not match."""

    @abstractmethod
    def rows(self, read: Read, parts: tuple[str, ...], start: int, stop: int) -> np.ndarray:
        """Rows start..stop-1 of the matrix, in float32."""


def _pairs(numbers: Float32[np.ndarray, "16"]) -> Float32[np.ndarray, "256 2"]:
    """By byte, the two numbers for its lower and its upper 4 bits."""
    return np.stack([np.tile(numbers, 16), np.repeat(numbers, 16)], axis=1)


class Mxfp4(Packing):
    """MXFP4 (Open Compute Project, Microscaling Formats 1.0): blocks of 32 4-bit numbers, with a scale per block.

    In gpt-oss, a tensor `name` [E, D, M] is stored as two tensors of bytes: `name_blocks` [E, M, D / 32, 16] has pairs
    of numbers along D, the first in the lower bits, and `name_scales` [E, M, D / 32] has the exponents.
    """

    suffixes = "_blocks", "_scales"
    _PAIR_BYTES = 16  # per block
    _POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    _PAIRS = _pairs(np.concatenate([_POSITIVE, -_POSITIVE]))
    _SCALES = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))

    def __init__(self, config: JsonConfig) -> None:
        """Its attributes do not change the values."""

    def _shape(self, blocks: TensorInfo, scales: TensorInfo) -> Shape | None:
        is_known = (blocks.dtype, scales.dtype, blocks.shape) == ("U8", "U8", (*scales.shape, self._PAIR_BYTES))
        if not is_known or len(scales.shape) != 3:
            return None
        experts, outputs, num_blocks = scales.shape
        return experts, num_blocks * 2 * self._PAIR_BYTES, outputs

    def rows(self, read: Read, parts: tuple[str, ...], start: int, stop: int) -> Float32[np.ndarray, "E D M"]:
        blocks, scales = (read(part, start, stop) for part in parts)  # [E, M, D / 32, 16], [E, M, D / 32]
        values: Float32[np.ndarray, "E M blocks 16 2"] = self._PAIRS[blocks]
        values *= self._SCALES[scales][..., None, None]
        return values.reshape(*blocks.shape[:2], -1).transpose(0, 2, 1)


class Fp8(Packing):
    """FP8 in blocks, the format of DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) and Qwen3's FP8 models.

    A matrix `name` [M, D] has 8-bit numbers (e4m3). `name_scale_inv` [ceil(M / rows), ceil(D / columns)] has a scale
    per block of [rows, columns] numbers; blocks at the end may be smaller.
    """

    suffixes = "", "_scale_inv"
    _NUMBERS = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)

    def __init__(self, config: JsonConfig) -> None:
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

    def _shape(self, numbers: TensorInfo, scales: TensorInfo) -> Shape | None:
        num_blocks = tuple(-(-size // part) for size, part in zip(numbers.shape, self._block, strict=False))
        is_known = numbers.dtype == "F8_E4M3" and scales.dtype in FLOAT_DTYPES
        return numbers.shape if is_known and len(numbers.shape) == 2 and scales.shape == num_blocks else None

    def rows(self, read: Read, parts: tuple[str, ...], start: int, stop: int) -> Float32[np.ndarray, "M D"]:
        rows, columns = self._block
        values = self._NUMBERS[read(parts[0], start, stop).view(np.uint8)]
        scales = read(parts[1], start // rows, -(-stop // rows)).astype(np.float32)  # of the blocks with these rows
        column_scales = np.repeat(scales, columns, axis=1)[:, : values.shape[1]]
        first = -(start % rows)  # the start of the first block
        for number, row_scales in enumerate(column_scales):
            end = first + (number + 1) * rows
            values[max(end - rows, 0) : end] *= row_scales
        return values


class Int4(Packing):
    """INT4 in groups: `pack-quantized` of the library compressed-tensors, the format of Kimi K2's thinking models.

    A matrix `name` [M, D] is stored as `name_packed` [M, D / 8], int32 with eight 4-bit numbers along D each, the first
    in the lowest bits; `name_scale` [M, groups], a scale per group of consecutive numbers of a row; and `name_shape`,
    [M, D] itself, which follows from the other two. Asymmetric ones have `name_zero_point` [M / 8, groups], with eight
    numbers along M in a word.
    """

    suffixes = "_packed", "_scale", "_shape"
    _NUMBERS = np.arange(16, dtype=np.float32) - 8
    _PAIRS = _pairs(_NUMBERS)

    def __init__(self, config: JsonConfig) -> None:
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

    def _shape(self, packed: TensorInfo, scales: TensorInfo, _shape: TensorInfo, *zeros: TensorInfo) -> Shape | None:
        is_known = packed.dtype == "I32" and scales.dtype in FLOAT_DTYPES
        if not is_known or not len(packed.shape) == len(scales.shape) == 2 or packed.shape[0] != scales.shape[0]:
            return None
        (rows, words), num_groups = packed.shape, scales.shape[1]
        has_zeros = all((info.dtype, info.shape) == ("I32", (-(-rows // _PER_WORD), num_groups)) for info in zeros)
        return (rows, words * _PER_WORD) if has_zeros and num_groups and words * _PER_WORD % num_groups == 0 else None

    def rows(self, read: Read, parts: tuple[str, ...], start: int, stop: int) -> Float32[np.ndarray, "M D"]:
        packed, scales = (read(part, start, stop) for part in parts[:2])
        values = self._PAIRS[packed.view(np.uint8)].reshape(*scales.shape, -1)
        for part in parts[3:]:
            words = read(part, start // _PER_WORD, -(-stop // _PER_WORD))
            values -= self._NUMBERS[_down(words)[start % _PER_WORD :][: stop - start]][..., None]
        values *= scales.astype(np.float32)[..., None]
        return values.reshape(len(packed), -1)


class Columns(Packing):
    """4-bit numbers of two formats that store a matrix transposed: GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978).

    A matrix `name.weight` [M, D] has `name.scales` [groups, M] and int32 words of eight 4-bit numbers: `name.qzeros`
    [groups, M / 8], along M, and `name.qweight`, in GPTQ [D / 8, M], along D, in AWQ [D, M / 8], along M. In AWQ, a
    word's numbers are in the order 0, 2, 4, 6, 1, 3, 5, 7. GPTQ may have `name.g_idx` [D], the group of each input;
    otherwise a group is consecutive inputs. weight = (number - zero) * scale. GPTQ stores zeros minus 1, except as
    `gptq_v2`.
    """

    suffixes, optional, ending = (".qweight", ".qzeros", ".scales"), (".g_idx",), ".weight"
    _IMPLEMENTED: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "awq": {"bits": 4, "zero_point": True},
        "gptq": {"bits": 4, "pack_dtype": "int32", "is_marlin_format": False, "lm_head": False, "dynamic": {}},
    }
    _UNUSED = (  # attributes of kernels and of the calibration; with `desc_act`, the order of columns is in the weights
        *("backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment"),
        *("damp_percent", "dataset", "desc_act", "disable_exllama", "do_fuse", "exllama_config", "fuse_max_seq_len"),
        *("group_size", "max_input_length", "meta", "model_file_base_name", "model_name_or_path", "model_seqlen"),
        *("static_groups", "sym", "module_name_preceding_first_block", "modules_in_block_to_quantize"),
        *("modules_to_fuse", "pad_token_id", "modules_to_not_convert", "tokenizer", "true_sequential"),
        *("use_cuda_fp16", "use_exllama"),
    )

    def __init__(self, config: JsonConfig) -> None:
        """Of AWQ, the layout of AutoAWQ's `gemm` with zeros."""
        method, self._where = config.choice("quant_method", self._IMPLEMENTED), config.where
        self._is_awq = method == "awq"
        self._zero_offset = 0  # added to stored zeros
        config.require(self._IMPLEMENTED[method])
        if self._is_awq:
            config.choice("version", ("gemm", "GEMM"), "gemm")
        else:
            self._zero_offset = int(config.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq")
        config.ignore(*self._UNUSED)
        config.finish()
        self._whole = lru_cache(maxsize=4)(self._read_whole)  # four leaves are loaded at a time
        self._locks: dict[tuple[str, ...], Lock] = defaultdict(Lock)  # several threads need a matrix, but one reads it

    def _shape(self, words: TensorInfo, zeros: TensorInfo, scales: TensorInfo, *groups: TensorInfo) -> Shape | None:
        are_words = scales.dtype in FLOAT_DTYPES and all(info.dtype == "I32" for info in (words, zeros, *groups))
        if not are_words or any(len(info.shape) != 2 for info in (words, zeros, scales)):
            return None
        (inputs, outputs), num_groups = words.shape, scales.shape[0]
        inputs, outputs = (inputs, outputs * _PER_WORD) if self._is_awq else (inputs * _PER_WORD, outputs)
        shapes = [(num_groups, outputs // _PER_WORD), (num_groups, outputs), *[(inputs,) for _ in groups]]
        has_groups = num_groups > 0 and (groups or inputs % num_groups == 0)
        return (outputs, inputs) if has_groups and [info.shape for info in (zeros, scales, *groups)] == shapes else None

    def rows(self, read: Read, parts: tuple[str, ...], start: int, stop: int) -> Float32[np.ndarray, "M D"]:
        """From the whole parts, in which these rows are columns."""
        with self._locks[parts]:
            words, zeros, scales, *groups = self._whole(read, parts)
        columns = slice(start, stop)
        numbers = self._across(words, columns) if self._is_awq else _down(words[:, columns])
        zeros = (self._across(zeros, columns) + self._zero_offset) & 15
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

    def _across(self, words: Int32[np.ndarray, "rows words"], columns: slice) -> UInt8[np.ndarray, "rows M"]:
        """The numbers of these columns, from words of eight columns each."""
        order = [0, 4, 1, 5, 2, 6, 3, 7] if self._is_awq else range(_PER_WORD)
        first = columns.start // _PER_WORD
        words = words[:, first : -(-columns.stop // _PER_WORD), None]
        numbers = (words >> (4 * np.array(order))).astype(np.uint8) & 15
        skipped = first * _PER_WORD
        return numbers.reshape(len(words), -1)[:, columns.start - skipped : columns.stop - skipped]


def _down(words: Int32[np.ndarray, "words M"]) -> UInt8[np.ndarray, "D M"]:
    """The numbers of words of eight rows each."""
    numbers = (words[:, None] >> (4 * np.arange(_PER_WORD)[:, None])).astype(np.uint8) & 15
    return numbers.reshape(-1, words.shape[1])


_FORMATS: Mapping[str, type[Packing]] = {  # by `quant_method`
    **{"mxfp4": Mxfp4, "fp8": Fp8, "compressed-tensors": Int4, "gptq": Columns, "awq": Columns}
}


def read_packing(config: JsonConfig) -> Packing:
    """The format of packed weights. Raises CheckpointError if it is not implemented."""
    return _FORMATS[config.choice("quant_method", _FORMATS)](config)
