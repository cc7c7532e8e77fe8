"""A Hugging Face checkpoint: config.json, and tensors in one or many safetensors files."""

import hashlib
import json
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np

from pipeline.core.errors import CheckpointError
from pipeline.core.messages import shown
from pipeline.models.checkpoints import fp8, mxfp4
from pipeline.models.checkpoints.checkpoint_files import Files, read_json
from pipeline.models.checkpoints.safetensors_file import SafetensorsFile, TensorInfo

_TRUNKS = (  # first the prefixes of vision-language models, then each family's `base_model_prefix` in transformers
    *("model.language_model.", "language_model."),
    *("model.", "gpt_neox.", "transformer.", "bert."),
)
_HEADS = ("lm_head.weight", "embed_out.weight")  # names without a trunk prefix
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SAMPLES_PER_TENSOR = 16
_MANY_TENSORS = 1024  # with more tensors there are fewer samples per tensor, but at least one
_SAMPLE_BYTES = 4096
_DIGEST_THREADS = 32  # many, since reads from object storage mostly wait
_MERGE = (
    "Merge it into its base model, and give the folder of the merged model: PeftModel.from_pretrained(base, path)"
    ".merge_and_unload().save_pretrained(new_path)."
)


def current_name(name: str) -> str:
    """A tensor's name in current transformers. The first BERT checkpoints have TensorFlow's names for LayerNorm."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _is_file_name(name: object) -> bool:
    """Whether this names a safetensors file in the index's folder. Lone surrogates are not printable."""
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and name.isprintable()
        and not {*name} & {*"/\\"}
        and len(name.encode()) < 256
    )


class Checkpoint:
    """The tensors of a checkpoint by their HF names. Files are opened, or downloaded from the Hub, on first use.

    Every method raises CheckpointError, which names the file, if something is missing or damaged.
    """

    def __init__(self, files: Files) -> None:
        self.where = files.where
        self.commit = files.commit
        self.is_remote = files.is_remote
        self._files = files
        self._opened: dict[str, SafetensorsFile] = {}

    @cached_property
    def config(self) -> Mapping[str, object]:
        """The content of config.json."""
        if not self._files.has("config.json") and self._files.has("adapter_config.json"):
            raise CheckpointError(f"{self.where} is a PEFT adapter (it has adapter_config.json), not a model. {_MERGE}")
        return read_json(self._files, "config.json", "Is it a directory in Hugging Face format?")

    @cached_property
    def generation_config(self) -> Mapping[str, object]:
        """The content of generation_config.json; empty if the checkpoint has no such file."""
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
            raise CheckpointError(f"{self.where}/{_INDEX} has no weight_map of tensors to files. Download it again.")
        outside = [name for name in weight_map.values() if not _is_file_name(name)]
        if outside:
            raise CheckpointError(
                f"{self.where}/{_INDEX} names {shown(outside[0])}, expected names of safetensors files in the same "
                f"directory. Download it again."
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
        """A tensor's dtype and shape, for MXFP4 and FP8 after unpacking; None if the checkpoint lacks the tensor."""
        name = self._stored_names.get(name, name)
        if name not in self._packed:
            return self._open_indexed(name).tensors.get(name) if name in self.file_of else None
        parts = [self._open_indexed(part).tensors.get(part) for part in self._packed[name]]
        if None in parts:
            return None
        return fp8.unpacked_info(*parts, self._fp8_block) if name in self._in_fp8 else mxfp4.unpacked_info(*parts)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start..stop-1 of a tensor's first axis, in the file's dtype; MXFP4 and FP8 are unpacked to float32."""
        name = self._stored_names.get(name, name)
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
        """The names of all tensors; one name for both parts of a tensor in MXFP4 or FP8."""
        packed = {part: name for name, parts in self._packed.items() for part in parts}
        return dict.fromkeys(packed.get(name, name) for name in self.file_of)

    @cached_property
    def _packed(self) -> Mapping[str, tuple[str, ...]]:
        """Tensor in MXFP4 or FP8 -> the names of its parts."""
        return self._pairs(mxfp4.SUFFIXES) | self._in_fp8

    @cached_property
    def _in_fp8(self) -> Mapping[str, tuple[str, ...]]:
        pairs = self._pairs(fp8.SUFFIXES)
        return pairs if pairs and self._fp8_block else {}

    def _pairs(self, suffixes: tuple[str, str]) -> dict[str, tuple[str, ...]]:
        """Name without suffix -> the names of its two parts, if the files contain both."""
        names = (name.removesuffix(suffixes[1]) for name in self.file_of if name.endswith(suffixes[1]))
        pairs = {name: tuple(name + suffix for suffix in suffixes) for name in names}
        return {name: parts for name, parts in pairs.items() if self.file_of.keys() >= {*parts}}

    @cached_property
    def _fp8_block(self) -> tuple[int, int] | None:
        return fp8.block_shape(self.config)

    @cached_property
    def _stored_names(self) -> Mapping[str, str]:
        """Current name -> the name in this checkpoint."""
        return {current_name(name): name for name in self.file_of}

    @cached_property
    def digest(self) -> str:
        """A SHA-256 over every tensor's name, dtype, shape and evenly spaced samples of its bytes.

        It does not depend on how tensors are divided among files. Finetuning changes every sample, so it changes the
        digest. At most 64 KiB are read per tensor, 4 KiB if there are very many tensors (experts).
        """
        num_samples = max(1, min(_SAMPLES_PER_TENSOR, _SAMPLES_PER_TENSOR * _MANY_TENSORS // len(self.file_of)))

        def sample(name: str) -> bytes:
            file = self._open_indexed(name)
            if name not in file.tensors:
                raise CheckpointError(f"{file.name} lacks {name}, which {_INDEX} assigns to it. Download it again.")
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
            remedy = f"These are the weights of an adapter. {_MERGE}"
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
