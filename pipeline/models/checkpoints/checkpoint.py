"""A Hugging Face checkpoint: config.json, and tensors in one or many safetensors files."""

import hashlib
import json
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np

from pipeline.core.errors import CheckpointError
from pipeline.core.json_text import shown
from pipeline.models.checkpoints import fp8, mxfp4
from pipeline.models.checkpoints.checkpoint_files import Files, read_json
from pipeline.models.checkpoints.safetensors_file import SafetensorsFile, TensorInfo

_TRUNKS = (  # transformers' `base_model_prefix` of the families; before it, that of language models beside vision
    *("model.language_model.", "language_model."),
    *("model.", "gpt_neox.", "transformer.", "bert."),
)
_HEADS = ("lm_head.weight", "embed_out.weight")  # outside the trunk
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SAMPLES_PER_TENSOR = 16
_MANY_TENSORS = 1024  # of which as many samples are taken as of these, but at least one of each
_SAMPLE_BYTES = 4096
_DIGEST_THREADS = 32  # reads from object storage wait most of their time


def current_name(name: str) -> str:
    """A tensor's name in current transformers: the first BERT checkpoints have TensorFlow's names for LayerNorm."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _is_file_name(name: object) -> bool:
    """Whether this names a safetensors file in the index's folder; lone surrogates are not printable."""
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and name.isprintable()
        and not {*name} & {*"/\\"}
        and len(name.encode()) < 256
    )


class Checkpoint:
    """The tensors of a checkpoint by their HF names. Files are opened, or fetched from the Hub, on first use.

    Every method raises CheckpointError, naming the file, for what is missing or damaged.
    """

    def __init__(self, files: Files) -> None:
        self.where = files.where
        self.commit = files.commit
        self.is_remote = files.is_remote
        self._files = files
        self._opened: dict[str, SafetensorsFile] = {}

    @cached_property
    def config(self) -> Mapping[str, object]:
        """config.json."""
        return read_json(self._files, "config.json", "Is it a directory in Hugging Face format?")

    @cached_property
    def generation_config(self) -> Mapping[str, object]:
        """generation_config.json; empty where the checkpoint has none."""
        return read_json(self._files, "generation_config.json") if self._files.has("generation_config.json") else {}

    @cached_property
    def file_of(self) -> Mapping[str, str]:
        """The file that contains each tensor."""
        if self._files.has(_SINGLE):
            return dict.fromkeys(self._open(_SINGLE).tensors, _SINGLE)
        if not self._files.has(_INDEX):
            raise self._no_weights()
        weight_map = read_json(self._files, _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self.where}/{_INDEX} has no weight_map from tensors to files. Download it again.")
        outside = [name for name in weight_map.values() if not _is_file_name(name)]
        if outside:
            raise CheckpointError(
                f"{self.where}/{_INDEX} names {shown(outside[0])}, expected names of safetensors files beside it: "
                f"nothing else is read. Download it again."
            )
        return weight_map

    @cached_property
    def prefix(self) -> str:
        """The prefix of the trunk's keys; "" in checkpoints that were saved without a head."""
        return next((trunk for trunk in _TRUNKS if any(name.startswith(trunk) for name in self.file_of)), "")

    def full_name(self, name: str) -> str:
        """The name in this checkpoint of the tensor with this HF key."""
        return name if name in _HEADS else self.prefix + name

    def info(self, name: str) -> TensorInfo | None:
        """A tensor's dtype and shape, of MXFP4 and FP8 those of its numbers; None where its file lacks it."""
        name = self._stored_name(name)
        if name not in self._packed:
            return self._open_indexed(name).tensors.get(name) if name in self.file_of else None
        parts = [self._open_indexed(part).tensors.get(part) for part in self._packed[name]]
        if None in parts:
            return None
        return fp8.unpacked_info(*parts, self._fp8_block) if name in self._in_fp8 else mxfp4.unpacked_info(*parts)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start..stop-1 of a tensor's first axis, in the file's dtype, or the float32 numbers of MXFP4 and FP8."""
        name = self._stored_name(name)
        if name not in self._packed:
            return self._stored_rows(name, start, stop)
        first, second = self._packed[name]
        numbers = self._stored_rows(first, start, stop)
        if name not in self._in_fp8:
            return mxfp4.unpacked(numbers, self._stored_rows(second, start, stop))
        rows = self._fp8_block[0]
        scales = self._stored_rows(second, start // rows, -(-stop // rows))
        return fp8.unpacked(numbers, scales, start, self._fp8_block)

    def _stored_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._open_indexed(name).rows(name, start, stop)

    @cached_property
    def names(self) -> Collection[str]:
        """The names of all tensors; one for both parts of a tensor in MXFP4 or FP8."""
        packed = {part: name for name, parts in self._packed.items() for part in parts}
        return dict.fromkeys(packed.get(name, name) for name in self.file_of)

    @cached_property
    def _packed(self) -> Mapping[str, tuple[str, ...]]:
        """The tensors in MXFP4 or FP8, and the names of their parts."""
        return self._pairs(mxfp4.SUFFIXES) | self._in_fp8

    @cached_property
    def _in_fp8(self) -> Mapping[str, tuple[str, ...]]:
        pairs = self._pairs(fp8.SUFFIXES)
        return pairs if pairs and self._fp8_block else {}

    def _pairs(self, suffixes: tuple[str, str]) -> dict[str, tuple[str, ...]]:
        """The names without suffix of which the files contain both parts."""
        names = (name.removesuffix(suffixes[1]) for name in self.file_of if name.endswith(suffixes[1]))
        parts = {name: tuple(name + suffix for suffix in suffixes) for name in names}
        return {name: both for name, both in parts.items() if self.file_of.keys() >= {*both}}

    @cached_property
    def _fp8_block(self) -> tuple[int, int] | None:
        return fp8.block_shape(self.config)

    def _stored_name(self, name: str) -> str:
        return self._stored_names.get(name, name)

    @cached_property
    def _stored_names(self) -> Mapping[str, str]:
        return {current_name(name): name for name in self.file_of}

    @cached_property
    def digest(self) -> str:
        """A SHA-256 over every tensor's name, dtype, shape and evenly spread samples of its bytes.

        It does not depend on how tensors are divided among files. A finetune changes every sample, so it is seen;
        reading takes 64 KiB per tensor, whatever its size, and 4 KiB of each of the many tensors of experts.
        """
        num_samples = max(1, min(_SAMPLES_PER_TENSOR, _SAMPLES_PER_TENSOR * _MANY_TENSORS // len(self.file_of)))

        def sample(name: str) -> bytes:
            file = self._open_indexed(name)
            if name not in file.tensors:
                raise CheckpointError(f"{file.name} lacks {name}, which {_INDEX} puts there. Download it again.")
            info = file.tensors[name]
            header = json.dumps([name, info.dtype, info.shape]).encode()
            return header + file.sample(name, num_samples, _SAMPLE_BYTES)

        for name in self.file_of:  # before the threads, so that each file is opened once
            self._open_indexed(name)
        digest = hashlib.sha256()
        with ThreadPoolExecutor(_DIGEST_THREADS) as pool:
            for content in pool.map(sample, sorted(self.file_of)):
                digest.update(content)
        return digest.hexdigest()

    def _open_indexed(self, tensor: str) -> SafetensorsFile:
        name = self.file_of[tensor]
        try:
            return self._open(name)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self.where} lacks {name}, which {_INDEX} names. Download the missing file."
            ) from error

    def _open(self, name: str) -> SafetensorsFile:
        if name not in self._opened:
            self._opened[name] = SafetensorsFile(self._files.open(name))
        return self._opened[name]

    def _no_weights(self) -> CheckpointError:
        names = self._files.names()
        if any(name.startswith("adapter_model") for name in names):
            remedy = "These are the weights of an adapter: merge it into its base model and save that."
        elif any(name.endswith((".bin", ".pt", ".pth")) for name in names):
            remedy = (
                "Pickled weights are never read. Convert them: AutoModelForCausalLM.from_pretrained(path)"
                ".save_pretrained(new_path)."
            )
        else:
            remedy = "Download the weights, or set model.init=random."
        return CheckpointError(
            f"{self.where} has no weights: expected {_SINGLE} or {_INDEX}, got {', '.join(names)}. {remedy}"
        )
