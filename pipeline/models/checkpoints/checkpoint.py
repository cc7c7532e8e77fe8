"""A Hugging Face checkpoint: config.json, and tensors in one or many files of safetensors or torch."""

import hashlib
import json
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np

from pipeline.core.errors import CheckpointError
from pipeline.core.messages import shown
from pipeline.models.checkpoints.checkpoint_files import Files, read_json
from pipeline.models.checkpoints.json_config import JsonConfig
from pipeline.models.checkpoints.packed import Packing, read_packing
from pipeline.models.checkpoints.safetensors_file import SafetensorsFile, TensorFile, TensorInfo
from pipeline.models.checkpoints.torch_file import TorchFile

_TRUNKS = (  # first the prefixes of vision-language models, then each family's `base_model_prefix` in transformers
    *("model.language_model.", "language_model.model.", "language_model."),
    *("model.decoder.", "model.", "backbone.", "gpt_neox.", "transformer.", "bert.", "roberta.", "decoder."),
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
        """A tensor's dtype and shape, unpacked if it is packed; None if the checkpoint lacks the tensor."""
        name = self._stored_names.get(name, name)
        if name not in self._parts:
            return self._open_indexed(name).tensors.get(name) if name in self.file_of else None
        parts = [self._open_indexed(part).tensors.get(part) for part in self._parts[name]]
        return None if None in parts else self.packing.info(*parts)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start..stop-1 of a tensor's first axis, in the file's dtype; packed ones are unpacked to float32."""
        name = self._stored_names.get(name, name)
        if name in self._parts:
            return self.packing.rows(self._stored_rows, self._parts[name], start, stop)
        return self._stored_rows(name, start, stop)

    def _stored_rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        file = self._open_indexed(name)
        return file.rows(name, start, file.tensors[name].shape[0] if stop is None else stop)

    @cached_property
    def names(self) -> Collection[str]:
        """The names of all tensors; one name for the parts of a packed tensor."""
        packed = {part: name for name, parts in self._parts.items() for part in parts}
        return dict.fromkeys(packed.get(name, name) for name in self.file_of)

    @cached_property
    def packing(self) -> Packing | None:
        """How matrices are packed; None if they are not. Raises CheckpointError for formats that are not
        implemented."""
        config = JsonConfig(
            self.config, f"{self.where}/config.json", "checkpoint, such as the one from which it was quantised"
        )
        config = next((c for c in (config, config.nested("text_config")) if "quantization_config" in c), None)
        return None if config is None else read_packing(config.nested("quantization_config"))

    @cached_property
    def _parts(self) -> Mapping[str, tuple[str, ...]]:
        """Packed tensor -> the names of its parts."""
        return {} if self.packing is None else self.packing.parts(self.file_of)

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
        return CheckpointError(
            f"{self.where} has no weights: expected {' or '.join(_SINGLE)} or an index of several such files, got "
            f"{', '.join(self._files.names())}. Download the weights, or set model.init=random; an adapter's weights "
            f"are for model.adapter. Convert others: AutoModelForCausalLM.from_pretrained(path).save_pretrained(new)."
        )
