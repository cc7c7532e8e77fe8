"""LoRA adapters in PEFT's format (Hu et al., arXiv 2106.09685), merged into the base model's tensors as they are read.

A merged weight is W + scale * B A in float32. With DoRA (Liu et al., arXiv 2402.09353), each of its rows then gets a
learned norm. Other tensors of the adapter (biases, `modules_to_save`) replace those of the base model.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache

import jax
import numpy as np

from pipeline.core.errors import CheckpointError
from pipeline.core.messages import shown
from pipeline.models.architecture import Architecture, KeyTable
from pipeline.models.checkpoints.checkpoint import Checkpoint, sampled_digest, without_trunk
from pipeline.models.checkpoints.checkpoint_files import Files, read_config
from pipeline.models.checkpoints.loading import unused_tensors
from pipeline.models.checkpoints.safetensors_file import SafetensorsFile, shortened, tensor_problems
from pipeline.models.leaves import Leaf, LeafTree

CONFIG_FILE = "adapter_config.json"
_WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LORA = re.compile(r"(.*)\.(lora_A\.weight|lora_B\.weight|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)")
_NOT_CAPTURED = (  # parts of a checkpoint that are not read: other modalities, and heads of encoders and classifiers
    *("visual.", "vision_tower.", "vision_model.", "vision_embedder.", "audio_tower.", "embed_vision.", "embed_audio."),
    *("multi_modal_projector.", "mm_projector."),
    *("cls.", "pooler.", "classifier.", "score."),
)
_KEPT_FACTORS = 8  # tensors whose factors stay in memory; up to four leaves are loaded at a time

# Attributes that the names and shapes of the tensors already tell, or that matter in training only. Any other has no
# effect if it is switched off (null, false, empty).
_HARMLESS = frozenset(
    """
    auto_mapping bias corda_config ensure_weight_tying eva_config exclude_modules fan_in_fan_out inference_mode
    init_lora_weights layers_pattern layers_to_transform loftq_config lora_dropout lora_ga_config megatron_core
    modules_to_save peft_version qalora_group_size revision runtime_config target_modules task_type
    """.split()  # noqa: SIM905
)
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")  # those that leave the base weights as they are


@dataclass(frozen=True)
class _Delta:
    """What LoRA adds to a tensor: scale * B A."""

    a: str  # the names of A [rank, inputs] and B [outputs, rank] in the adapter
    b: str
    scale: float
    is_transposed: bool  # the tensor is [inputs, outputs], or an embedding
    norms: str | None  # DoRA: the name of the norms of the merged weight's rows


class Adapter:
    """An adapter for the tensors of `leaves`. Its tensors are compared with them; values are read when merged.

    Raises CheckpointError if a file is missing or damaged, if a setting is not implemented, and, naming the tensors, if
    some do not belong to the model.
    """

    def __init__(self, files: Files, arch: Architecture, table: KeyTable, leaves: LeafTree) -> None:
        self.where, self.commit = files.where, files.commit
        config = read_config(files, CONFIG_FILE, user="adapter, or merge this one with PEFT")
        config.choice("peft_type", ("LORA",))
        if (start := config.values.get("init_lora_weights", True)) not in _PLAIN_STARTS:
            remedy = "Save the adapter with PEFT's path_initial_model_for_weight_conversion, or merge it with PEFT."
            raise config.not_implemented("init_lora_weights", start, ", ".join(map(str, _PLAIN_STARTS)), remedy)
        config.flag("use_dora", False)  # its tensors tell
        self.base = config.text("base_model_name_or_path")
        self._rank, self._alpha = config.positive_int("r", 8), config.positive_float("lora_alpha", 8)
        self._ranks, self._alphas = config.nested("rank_pattern"), config.nested("alpha_pattern")
        self._uses_root = config.flag("use_rslora", False)
        config.finish([key for key, value in config.values.items() if key in _HARMLESS or not value])
        try:
            self._file = SafetensorsFile(files.open(_WEIGHTS_FILE))
        except FileNotFoundError:
            raise CheckpointError(
                f"{files.where} has no {_WEIGHTS_FILE}, got {', '.join(files.names())}. Save the adapter again: "
                f"PeftModel.from_pretrained(base, path).save_pretrained(new_path)."
            ) from None
        self._deltas: dict[str, _Delta] = {}  # tensor, without the model's prefix
        self._replaced: dict[str, str] = {}  # tensor, without the model's prefix -> its name in the adapter
        self._factors = lru_cache(_KEPT_FACTORS)(self._read_factors)
        self._match(arch, table, {name: leaf for leaf in jax.tree.leaves(leaves) for name in leaf.tensors})

    @cached_property
    def digest(self) -> str:
        """Identifies the adapter's tensors and scales."""
        deltas = json.dumps({name: asdict(delta) for name, delta in self._deltas.items()}, sort_keys=True)
        tensors = sampled_digest(dict.fromkeys(self._file.tensors, self._file))
        return hashlib.sha256(f"{tensors} {deltas}".encode()).hexdigest()

    @property
    def changed(self) -> set[str]:
        """The tensors that the adapter changes, named without the model's prefix."""
        return {*self._deltas, *self._replaced}

    def merged(self, name: str, rows: np.ndarray, start: int) -> np.ndarray:
        """A tensor's rows from `start`, given those of the base model."""
        stop = start + len(rows)
        if name in self._replaced:
            rows = self._file.rows(self._replaced[name], start, stop)
        delta = self._deltas.get(name)
        if delta is None:
            return rows
        a, b = self._factors(delta)
        left, right = (a.T, b.T) if delta.is_transposed else (b, a)
        # In float64, so that rounded sums do not depend on how many rows are read at once.
        added = delta.scale * (left[start:stop].astype(np.float64) @ right.astype(np.float64))
        rows = rows.astype(np.float32) + added.astype(np.float32)
        if delta.norms is not None:
            norms = self._file.rows(delta.norms, start, stop).astype(np.float32)
            rows *= (norms / np.linalg.norm(rows, axis=1))[:, None]
        return rows

    def _read_factors(self, delta: _Delta) -> list[np.ndarray]:
        shapes = {name: self._file.tensors[name].shape for name in (delta.a, delta.b)}
        return [self._file.rows(name, 0, shape[0]).astype(np.float32) for name, shape in shapes.items()]

    def _match(self, arch: Architecture, table: KeyTable, leaves: Mapping[str, Leaf]) -> None:
        """Finds the model's tensor for each of the adapter's. `leaves` has a leaf of each, without prefix."""
        unused, problems, modules = unused_tensors(arch, table), [], {}
        for name in self._file.tensors:
            lora = _LORA.fullmatch(name)
            module = name.removesuffix(".weight") if lora is None else lora[1]
            target = name.replace(".base_layer.", ".") if lora is None else f"{module}.weight"
            target = without_trunk(target.removeprefix(_PREFIX))
            leaf = leaves.get(target)
            if not name.startswith(_PREFIX) or (
                leaf is None and not target.startswith(_NOT_CAPTURED) and not unused(target)
            ):
                problems.append(f"{name:.200} belongs to no tensor of the model")
            elif modules.setdefault((target, lora is None), module) != module:
                problems.append(f"{name:.200} is for the same tensor as {modules[target, lora is None]:.200}")
            elif leaf is not None and lora is None:
                self._replaced[target] = name
                problems += tensor_problems({name: leaf.hf_shape}, self._file.tensors.get)
            elif leaf is not None and target not in self._deltas:
                delta, rank = self._delta(module, leaf)
                self._deltas[target] = delta
                problems += tensor_problems(_shapes(delta, rank, leaf.hf_shape), self._file.tensors.get)
        if problems or not (self._deltas or self._replaced):
            raise CheckpointError(
                f"the adapter {self.where} does not fit this model: "
                f"{'; '.join(shortened(problems)) or 'it changes no tensor of the model'}. Set model.path to its base "
                f"model ({shown(self.base)}). An adapter with other tensors than LoRA's must be merged with PEFT, and "
                f"the merged model given as model.path."
            )

    def _delta(self, module: str, leaf: Leaf) -> tuple[_Delta, int]:
        """A module's delta, and its rank."""
        rank, scale = self._rank_and_scale(module.removeprefix(_PREFIX))
        inputs_first = leaf.num_inputs > 0 and leaf.order.index(0) >= len(leaf.order) - leaf.num_inputs
        is_embedding = f"{module}.lora_embedding_A" in self._file.tensors
        norms = f"{module}.lora_magnitude_vector" if f"{module}.lora_magnitude_vector" in self._file.tensors else None
        if norms and (is_embedding or inputs_first):
            raise CheckpointError(
                f"{self.where} has DoRA for {module}, which is implemented for linear layers only. Merge it "
                f"with PEFT, and give the merged model as model.path."
            )
        a, b = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A.weight", "lora_B.weight")
        return _Delta(f"{module}.{a}", f"{module}.{b}", scale, is_embedding or inputs_first, norms), rank

    def _rank_and_scale(self, module: str) -> tuple[int, float]:
        """As PEFT computes them. A pattern is a regular expression for a module's name, or for its end."""
        try:
            ranks, alphas = (
                [key for key in patterns.values if re.fullmatch(rf"(.*\.)?({key})", module)]
                for patterns in (self._ranks, self._alphas)
            )
        except re.error as error:
            raise CheckpointError(
                f"{self.where}/{CONFIG_FILE}: rank_pattern or alpha_pattern has a pattern that is not a regular "
                f"expression: {error}. Is the file damaged?"
            ) from error
        rank = self._ranks.positive_int(ranks[0]) if ranks else self._rank
        alpha = self._alphas.positive_float(alphas[0]) if alphas else self._alpha
        return rank, alpha / (rank**0.5 if self._uses_root else rank)  # Kalajdzievski, arXiv 2312.03732


def _shapes(delta: _Delta, rank: int, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The expected shapes of the adapter's tensors for a tensor of this shape."""
    outputs, *inputs = reversed(shape) if delta.is_transposed else shape
    return {delta.a: (rank, *inputs), delta.b: (outputs, rank)} | ({delta.norms: (outputs,)} if delta.norms else {})


class AdaptedCheckpoint(Checkpoint):
    """A checkpoint with an adapter merged into its tensors."""

    def __init__(self, files: Files, adapter: Adapter, divides_head: bool) -> None:
        """`divides_head`: whether the embedding is also the head, and the adapter changes only one of the two, or both
        independently."""
        super().__init__(files)
        self.adapter, self._divides_head = adapter, divides_head

    @property
    def commits(self) -> dict[str, str]:
        commit = self.adapter.commit
        return super().commits | ({} if commit is None else {"adapter_commit": commit})

    @property
    def identity(self) -> dict[str, str]:
        return {"adapter": self.adapter.digest}

    @cached_property
    def _changed(self) -> dict[str, str]:
        """Tensor of the checkpoint that the adapter changes -> its name without the model's prefix."""
        return {self.full_name(name): name for name in self.adapter.changed}

    def check_head(self) -> None:
        if self._divides_head:
            raise CheckpointError(
                f"the adapter {self.adapter.where} changes the embedding or the head, which are one tensor in the base "
                f"model. PEFT's merged model and the model that was trained differ in this case, so the head is not "
                f"implemented. Capture activations only, or merge the adapter with PEFT and give that as model.path."
            )

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Like the base model's; in float32 where LoRA changes the tensor."""
        rows = super().rows(name, start, stop)
        return self.adapter.merged(self._changed[name], rows, start) if name in self._changed else rows
