"""A Hugging Face checkpoint: config.json, and tensors in one or many files of safetensors or torch."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from threading import Lock

import numpy as np

from pipeline.core.errors import CheckpointError
from pipeline.core.messages import shown
from pipeline.models.checkpoints.checkpoint_files import Files, read_json
from pipeline.models.checkpoints.packed import fp8, int4, int4_columns, mxfp4
from pipeline.models.checkpoints.packed.int4_columns import ColumnFormat
from pipeline.models.checkpoints.safetensors_file import SafetensorsFile, TensorFile, TensorInfo
from pipeline.models.checkpoints.torch_file import TorchFile

_TRUNKS = (  # first the prefixes of vision-language models, then each family's `base_model_prefix` in transformers
    *("model.language_model.", "language_model.model.", "language_model."),
    *("model.decoder.", "model.", "backbone.", "gpt_neox.", "transformer.", "bert.", "roberta."),
    "decoder.",
)
_HEADS = ("lm_head.weight", "lm_head.bias", "embed_out.weight")  # names without a trunk prefix
_SINGLE = ("model.safetensors", "pytorch_model.bin")  # the first is preferred
_SAMPLES_PER_TENSOR = 16
_MANY_TENSORS = 1024  # with more tensors there are fewer samples per tensor, but at least one
_SAMPLE_BYTES = 4096
_DIGEST_THREADS = 32  # many, since reads from object storage mostly wait


def current_name(name: str) -> str:
    """A tensor's name in current transformers. The first BERT checkpoints have TensorFlow's names for LayerNorm."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _is_file_name(name: object, suffix: str) -> bool:
    """Whether this names a file in the index's folder. Lone surrogates are not printable."""
    return (
        isinstance(name, str)
        and name.endswith(f".{suffix}")
        and name.isprintable()
        and not {*name} & {*"/\\"}
        and len(name.encode()) < 256
    )


def without_trunk(name: str) -> str:
    """A tensor's name without the prefixes of all its trunks, as in `model.language_model.layers.0...`"""
    trunk = next((trunk for trunk in _TRUNKS if name.startswith(trunk)), None)
    return name if trunk is None else without_trunk(name.removeprefix(trunk))


def sampled_digest(file_of: Mapping[str, TensorFile]) -> str:
    """A SHA-256 over every tensor's name, dtype, shape and evenly spaced samples of its bytes: at most 64 KiB of each
    tensor, 4 KiB if there are very many (experts). `file_of` has the file of each."""
    num_samples = max(1, min(_SAMPLES_PER_TENSOR, _SAMPLES_PER_TENSOR * _MANY_TENSORS // len(file_of)))

    def sample(name: str) -> bytes:
        info = file_of[name].tensors[name]
        header = json.dumps([name, info.dtype, info.shape]).encode()
        return header + file_of[name].sample(name, num_samples, _SAMPLE_BYTES)

    digest = hashlib.sha256()
    with ThreadPoolExecutor(_DIGEST_THREADS) as pool:
        for content in pool.map(sample, sorted(file_of)):
            digest.update(content)
    return digest.hexdigest()


class Checkpoint:
    """The tensors of a checkpoint by their HF names. Files are opened, or downloaded from the Hub, on first use.

    Every method raises CheckpointError, which names the file, if something is missing or damaged.
    """

    def __init__(self, files: Files) -> None:
        self.where = files.where
        self.commit = files.commit
        self.is_remote = files.is_remote
        self._files = files
        self._opened: dict[str, TensorFile] = {}
        self._whole_parts = lru_cache(maxsize=4)(self._read_whole_parts)  # four leaves are loaded at a time
        self._whole_locks: dict[str, Lock] = defaultdict(Lock)  # by tensor, which several threads need but one reads

    @property
    def commits(self) -> dict[str, str]:
        """The commit of a Hub model, and that of a Hub adapter."""
        return {} if self.commit is None else {"commit": self.commit}

    @property
    def identity(self) -> dict[str, str]:
        """What else than `digest` identifies the weights: an adapter."""
        return {}

    def check_head(self) -> None:
        """Raises CheckpointError if the head cannot be used."""

    @cached_property
    def config(self) -> Mapping[str, object]:
        """The content of config.json."""
        if not self._files.has("config.json") and self._files.has("adapter_config.json"):
            base = shown(read_json(self._files, "adapter_config.json").get("base_model_name_or_path"))
            raise CheckpointError(
                f"{self.where} is a PEFT adapter (it has adapter_config.json), not a model. Set "
                f"model.adapter to this path, and model.path to its base model ({base})."
            )
        return read_json(self._files, "config.json", "Is it a directory in Hugging Face format?")

    @cached_property
    def generation_config(self) -> Mapping[str, object]:
        """The content of generation_config.json; empty if the checkpoint has no such file."""
        return read_json(self._files, "generation_config.json") if self._files.has("generation_config.json") else {}

    @cached_property
    def file_of(self) -> Mapping[str, str]:
        """The file that contains each tensor."""
        for single in _SINGLE:
            if self._files.has(single):
                return dict.fromkeys(self._open(single).tensors, single)
            if self._files.has(f"{single}.index.json"):
                return self._weight_map(f"{single}.index.json", single.rpartition(".")[2])
        raise self._no_weights()

    def _weight_map(self, index: str, suffix: str) -> Mapping[str, str]:
        weight_map = read_json(self._files, index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self.where}/{index} has no weight_map of tensors to files. Download it again.")
        outside = [name for name in weight_map.values() if not _is_file_name(name, suffix)]
        if outside:
            raise CheckpointError(
                f"{self.where}/{index} names {shown(outside[0])}, expected names of {suffix} files in the same "
                f"directory. Download it again."
            )
        return weight_map

    @cached_property
    def prefix(self) -> str:
        """The prefix of the trunk's keys; "" in checkpoints that were saved without a head."""
        return next((trunk for trunk in _TRUNKS if any(name.startswith(trunk) for name in self.file_of)), "")

    def full_name(self, name: str) -> str:
        """The name in this checkpoint of the tensor with this HF key."""
        if name not in _HEADS:
            return self.prefix + name
        in_language_model = f"language_model.{name}"  # where transformers 4 stores the head of some multimodal models
        return in_language_model if in_language_model in self.file_of else name

    def info(self, name: str) -> TensorInfo | None:
        """A tensor's dtype and shape, after unpacking (MXFP4, FP8, 4 bits); None if the checkpoint lacks the tensor."""
        name = self._stored_names.get(name, name)
        if name not in self._packed:
            return self._open_indexed(name).tensors.get(name) if name in self.file_of else None
        parts = [self._open_indexed(part).tensors.get(part) for part in self._packed[name]]
        if None in parts:
            return None
        if name in self._in_fp8:
            return fp8.unpacked_info(*parts, self._fp8_block)
        if name in self._in_columns:
            return self._columns.unpacked_info(*parts)
        if name not in self._in_int4:
            return mxfp4.unpacked_info(*parts)
        packed, scales, _, *zeros = parts
        return int4.unpacked_info(packed, scales, *zeros)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start..stop-1 of a tensor's first axis, in the file's dtype; packed ones are unpacked to float32."""
        name = self._stored_names.get(name, name)
        if name not in self._packed:
            return self._stored_rows(name, start, stop)
        if name in self._in_columns:
            with self._whole_locks[name]:
                parts = self._whole_parts(self._packed[name])
            return self._columns.unpacked(parts, start, stop)
        first, second, *_ = self._packed[name]
        numbers = self._stored_rows(first, start, stop)
        if name in self._in_fp8:
            rows = self._fp8_block[0]
            scales = self._stored_rows(second, start // rows, -(-stop // rows))
            return fp8.unpacked(numbers, scales, start, self._fp8_block)
        scales = self._stored_rows(second, start, stop)
        if name not in self._in_int4:
            return mxfp4.unpacked(numbers, scales)
        if not self._has_zeros:
            return int4.unpacked(numbers, scales)
        words = self._stored_rows(name + int4.ZEROS, start // int4.PER_WORD, -(-stop // int4.PER_WORD))
        return int4.unpacked(numbers, scales, int4.unpacked_zeros(words, start, stop))

    def _read_whole_parts(self, names: tuple[str, ...]) -> list[np.ndarray]:
        files = {name: self._open_indexed(name) for name in names}
        parts = [file.rows(name, 0, file.tensors[name].shape[0]) for name, file in files.items()]
        _, _, scales, *groups = parts
        if groups and not 0 <= groups[0].min() <= groups[0].max() < len(scales):
            raise CheckpointError(
                f"{self.where}: {names[-1]} has numbers from {groups[0].min()} to {groups[0].max()}, expected groups "
                f"from 0 to {len(scales) - 1}. Download the checkpoint again."
            )
        return parts

    def _stored_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._open_indexed(name).rows(name, start, stop)

    @cached_property
    def names(self) -> Collection[str]:
        """The names of all tensors; one name for the parts of a packed tensor."""
        packed = {part: name for name, parts in self._packed.items() for part in parts}
        return dict.fromkeys(packed.get(name, name) for name in self.file_of)

    @cached_property
    def _packed(self) -> Mapping[str, tuple[str, ...]]:
        """Tensor in MXFP4, FP8 or with 4 bits -> the names of its parts."""
        return self._parts(mxfp4.SUFFIXES) | self._in_fp8 | self._in_int4 | self._in_columns

    @cached_property
    def _in_fp8(self) -> Mapping[str, tuple[str, ...]]:
        pairs = self._parts(fp8.SUFFIXES)
        return pairs if pairs and self._fp8_block else {}

    @cached_property
    def _in_int4(self) -> Mapping[str, tuple[str, ...]]:
        return self._parts((*int4.SUFFIXES, int4.ZEROS) if self._has_zeros else int4.SUFFIXES)

    @cached_property
    def _has_zeros(self) -> bool:
        return bool(self._parts(int4.SUFFIXES)) and int4.has_zeros(self.config)

    @cached_property
    def _in_columns(self) -> Mapping[str, tuple[str, ...]]:
        modules = self._parts(int4_columns.SUFFIXES)
        if not modules or self._columns is None:
            return {}
        return {
            f"{module}.weight": (*parts, *[name for name in [module + int4_columns.GROUPS] if name in self.file_of])
            for module, parts in modules.items()
        }

    @cached_property
    def _columns(self) -> ColumnFormat | None:
        return ColumnFormat.of(self.config)

    def _parts(self, suffixes: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        """Name without suffix -> the names of its parts, if the files contain all."""
        names = (name.removesuffix(suffixes[-1]) for name in self.file_of if name.endswith(suffixes[-1]))
        parts_of = {name: tuple(name + suffix for suffix in suffixes) for name in names}
        return {name: parts for name, parts in parts_of.items() if self.file_of.keys() >= {*parts}}

    @cached_property
    def _fp8_block(self) -> tuple[int, int] | None:
        return fp8.block_shape(self.config)

    @cached_property
    def _stored_names(self) -> Mapping[str, str]:
        """Current name -> the name in this checkpoint."""
        return {current_name(name): name for name in self.file_of}

    @cached_property
    def digest(self) -> str:
        """`sampled_digest`, which does not depend on how tensors are divided among files. Finetuning changes every
        sample, so it changes the digest."""
        files = {name: self._open_indexed(name) for name in self.file_of}
        for name, file in files.items():
            if name not in file.tensors:
                raise CheckpointError(f"{file.name} lacks {name}, which the index assigns to it. Download it again.")
        return sampled_digest(files)

    def _open_indexed(self, tensor: str) -> TensorFile:
        name = self.file_of[tensor]
        try:
            return self._open(name)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self.where} lacks {name}, which the index names. Download the missing file."
            ) from error

    def _open(self, name: str) -> TensorFile:
        if name not in self._opened:
            if name.endswith(".bin"):
                self._opened[name] = TorchFile(self._files.open(name)).contiguous()
            else:
                self._opened[name] = SafetensorsFile(self._files.open(name))
        return self._opened[name]

    def _no_weights(self) -> CheckpointError:
        names = self._files.names()
        if any(name.startswith("adapter_model") for name in names):
            remedy = (
                "These are weights of an adapter. Set model.adapter to this path, and model.path to its base model."
            )
        elif any(name.endswith((".bin", ".pt", ".pth")) for name in names):
            remedy = (
                "Other files of torch are not read. Convert them: AutoModelForCausalLM.from_pretrained(path)"
                ".save_pretrained(new_path)."
            )
        else:
            remedy = "Download the weights, or set model.init=random."
        return CheckpointError(
            f"{self.where} has no weights: expected {' or '.join(_SINGLE)} or an index of several such files, got "
            f"{', '.join(names)}. {remedy}"
        )
