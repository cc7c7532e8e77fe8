"""The families that are implemented, and `open_model`, which tells them apart."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jax.sharding import Sharding
from jaxtyping import Array, Float, Int32, PyTree

from pipeline.core.errors import CheckpointError, ConfigError
from pipeline.core.sites import POST_NORM_HOOKS, UNROTATED_HOOKS, ActivationKey, Site
from pipeline.models import decoder
from pipeline.models.architecture import Architecture, KeyTable
from pipeline.models.attention.choosing import Attend
from pipeline.models.attention.xla import attend_xla
from pipeline.models.checkpoints.checkpoint import Checkpoint
from pipeline.models.checkpoints.checkpoint_files import open_files
from pipeline.models.checkpoints.loading import Placement, abstract_params, check_tensors, load_params
from pipeline.models.checkpoints.random_weights import random_params
from pipeline.models.families import bert, gemma, gpt2, gpt_neox, llama, mistral, olmo2, qwen2, qwen3
from pipeline.models.families.hf_config import HfConfig, refuse_unreadable
from pipeline.models.head import Head, HeadFormat, head_leaf, read_head
from pipeline.models.leaves import LeafTree, flops_per_token, needed_leaves, num_params, weight_bytes
from pipeline.models.partition import TENSOR_AXES, Partition
from pipeline.models.weight_specs import is_post_norm, weight_spec

_LM_HEAD = HeadFormat()


@dataclass(frozen=True)
class Family:
    """One value of config.json's `model_type`. `classes` names its models in transformers, up to the head."""

    read: Callable[[HfConfig], tuple[Architecture, KeyTable]]
    classes: str
    head: HeadFormat | None = _LM_HEAD  # None: encoders


_FAMILIES = {
    "bert": Family(bert.read, "Bert", head=None),
    "gemma2": Family(gemma.read_gemma2, "Gemma2", HeadFormat(is_tied=True, softcap=30.0)),
    "gemma3_text": Family(gemma.read_gemma3, "Gemma3", HeadFormat(is_tied=True)),
    "gpt2": Family(gpt2.read, "GPT2", HeadFormat(is_tied=True)),
    "gpt_neox": Family(gpt_neox.read, "GPTNeoX", HeadFormat("embed_out.weight")),
    "llama": Family(llama.read, "Llama"),
    "mistral": Family(mistral.read, "Mistral"),
    "olmo2": Family(olmo2.read, "Olmo2"),
    "qwen2": Family(qwen2.read, "Qwen2"),
    "qwen3": Family(qwen3.read, "Qwen3"),
}
_HEADS = (
    *("Model", "TextModel", "LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForPreTraining"),
    *("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForNextSentencePrediction"),
)


@dataclass(frozen=True)
class Model:
    """A model whose config.json has been read. Nothing of it is on a device before `load`."""

    family: str
    arch: Architecture
    table: KeyTable
    checkpoint: Checkpoint
    head: Head | None  # None: an encoder
    random_seed: int | None  # None: the checkpoint's weights

    @property
    def num_layers(self) -> int:
        return self.arch.num_layers

    @property
    def vocab_size(self) -> int:
        return self.arch.vocab_size

    @property
    def max_positions(self) -> int:
        return self.arch.max_positions

    @property
    def _weight_keys(self) -> set[str]:
        """Our keys of the weights that the model has."""
        return {entry if isinstance(entry, str) else entry[0] for entry in self.table.values()}

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites that this family has, in the order of the forward pass."""
        lacking = set()
        if self.arch.parallel:
            lacking.add(Site.resid_mid)
        if "final_norm" not in self._weight_keys:
            lacking.add(Site.final_norm)
        return tuple(site for site in Site if site not in lacking)

    def width(self, site: Site) -> int:
        """The size of a site's last axis."""
        match site:
            case Site.q | Site.attn_z:
                return self.arch.num_heads * self.arch.head_dim
            case Site.k | Site.v:
                return self.arch.num_kv_heads * self.arch.head_dim
            case Site.mlp_post:
                return self.arch.d_mlp
        return self.arch.d_model

    def hook_name(self, key: ActivationKey) -> str:
        """TransformerLens' name of the same place in this family."""
        if is_post_norm(self._weight_keys):
            return key.hook_name(POST_NORM_HOOKS)
        return key.hook_name(UNROTATED_HOOKS if self.arch.rope is None else {})

    def identity(self, by_commit: bool = False) -> dict[str, object]:
        """What determines the activations, as plain JSON: independent of where the checkpoint lies.

        The architecture is spelled out, so that two models that differ can be told how. Weights are sampled, for which
        those of the Hub are fetched; `by_commit` names the Hub's commit instead, as stores did that were made before.

        Raises CheckpointError for weights that are missing or damaged.
        """
        biases = sorted(key for key in self._weight_keys if weight_spec(key).is_bias)
        architecture = _spelled_out(self.arch) | {"biases": biases}
        identity = {"family": self.family, "architecture": architecture}
        if self.random_seed is not None:
            return identity | {"init": "random", "seed": self.random_seed}
        if by_commit:
            return identity | {"commit": self.checkpoint.commit}
        return identity | {"weights": self.checkpoint.digest}

    def num_params(self, keys: Sequence[ActivationKey]) -> int:
        """How many parameters are loaded to capture `keys`."""
        return num_params(self.leaves(keys))

    def weight_bytes(self, keys: Sequence[ActivationKey], dtype: str, with_int8: bool = False) -> tuple[int, int]:
        """What `load` takes in memory, each array counted once: of the layers' matrices, and of all else."""
        return weight_bytes(self.leaves(keys), dtype, with_int8)

    def generation_weight_bytes(self, dtype: str, with_int8: bool = False) -> tuple[int, int]:
        """As `weight_bytes`, of what generating takes. Raises ConfigError for an encoder."""
        return weight_bytes(self.generation_leaves(), dtype, with_int8)

    @property
    def tensor_dims(self) -> dict[str, int]:
        """What the mesh's `tensor` axis divides."""
        return {name: self.arch.axis_size(axis) for axis, name in TENSOR_AXES.items()}

    def flops_per_token(self, keys: Sequence[ActivationKey], length: int) -> int:
        """Floating-point operations per token slot to capture `keys` in rows of `length`."""
        return flops_per_token(self.arch, self.table, keys, length)

    def load(
        self,
        keys: Sequence[ActivationKey],
        dtype: str,
        sharding: Sharding | Placement,
        progress: bool = False,
        with_int8: bool = False,
    ) -> decoder.Params:
        """The parameters that `keys` need, on the devices, in `dtype` (float32 or bfloat16); `with_int8`, the layers'
        matrices in int8. `sharding` is of every array, or says which, as `Partition.leaf_sharding` does.

        Raises CheckpointError, naming every tensor that is missing, wrongly shaped or unexpected.
        """
        return self.load_leaves(self.leaves(keys), dtype, sharding, progress, with_int8)

    def load_leaves(
        self,
        needed: LeafTree,
        dtype: str,
        sharding: Sharding | Placement,
        progress: bool = False,
        with_int8: bool = False,
    ) -> PyTree[Array]:
        """As `load`, for any part of what `leaves` gives."""
        place = sharding if callable(sharding) else lambda _: sharding
        if self.random_seed is not None:
            return random_params(needed, self.random_seed, dtype, place, progress, with_int8)
        check_tensors(self.checkpoint, self.arch, self.table, needed)
        return load_params(self.checkpoint, needed, dtype, place, progress, with_int8)

    def abstract_params(
        self, keys: Sequence[ActivationKey], dtype: str, place: Placement, with_int8: bool = False
    ) -> decoder.Params:
        """Shapes, dtypes and placement of what `load` gives; nothing is read, and no device needed."""
        return abstract_params(self.leaves(keys), dtype, place, with_int8)

    def apply(
        self,
        params: decoder.Params,
        tokens: Int32[Array, "B T"],
        segments: Int32[Array, "B T"],
        positions: Int32[Array, "B T"],
        keys: Sequence[ActivationKey],
        attend: Attend | Sequence[Attend] = attend_xla,
        partition: Partition = Partition(),  # noqa: B008  frozen
        finish: Callable[[Float[Array, "B T width"]], Array] = lambda activation: activation,
    ) -> dict[ActivationKey, Array]:
        """What `finish` returns for the activation of each of `keys`. Pure, to be jitted; values at padding (segment 0)
        mean nothing."""
        spec = decoder.ForwardSpec(tuple(keys), attend, partition, finish)
        return decoder.forward(self.arch, params, decoder.Batch(tokens, segments, positions), spec)

    def leaves(self, keys: Sequence[ActivationKey]) -> LeafTree:
        """What `load` puts on the devices, not yet read."""
        return needed_leaves(self.arch, self.table, keys)

    def generation_keys(self, keys: Sequence[ActivationKey] = ()) -> tuple[ActivationKey, ...]:
        """What the forward pass of generation captures: `keys`, what goes into the cache, and what the head reads.

        They make each layer a run of its own. Raises ConfigError for an encoder.
        """
        if self.head is None:
            raise ConfigError(
                f"{self.checkpoint.where} is an encoder ({self.family}), which cannot generate. Use a causal model."
            )
        cached = {ActivationKey(layer, site) for layer in range(self.num_layers) for site in (Site.k, Site.v)}
        return tuple(sorted({*keys, *cached, ActivationKey(-1, Site.final_norm)}))

    def generation_leaves(self, keys: Sequence[ActivationKey] = ()) -> LeafTree:
        """What `load_leaves` puts on the devices to generate, and to capture `keys` while at it: all layers, and the
        head. Raises ConfigError for an encoder."""
        leaves = self.leaves(self.generation_keys(keys))
        return leaves | head_leaf(self.head, self.arch)

    def check_head(self) -> None:
        """Raises CheckpointError where the head is missing or wrongly shaped. The Hub's files are left for `load`."""
        if self.random_seed is None and self.checkpoint.commit is None:
            check_tensors(self.checkpoint, self.arch, self.table, head_leaf(self.head, self.arch))


def open_model(path: str, *, revision: str | None = None, init: str = "checkpoint", seed: int = 0) -> Model:
    """Reads config.json and, of a local or remote checkpoint, the headers of its safetensors files.

    `path` is a directory, a remote path (`gs://...`) or a Hub id; `revision` is of the latter. `init=random` needs
    only config.json. Raises CheckpointError for whatever would make the activations wrong, and PipelineError when
    the network fails.
    """
    if init not in ("checkpoint", "random"):
        raise ConfigError(f"model.init is {init!r}. Set it to checkpoint or random.")
    checkpoint = Checkpoint(open_files(path, revision))
    config = HfConfig(checkpoint.config, f"{checkpoint.where}/config.json")
    refuse_unreadable(config)
    name = config.choice("model_type", tuple(_FAMILIES))
    family = _FAMILIES[name]
    _check_classes(config, family)
    arch, table = family.read(config)
    head = None if family.head is None else read_head(config, family.head)
    config.finish()
    model = Model(name, arch, table, checkpoint, head, seed if init == "random" else None)
    if init == "checkpoint" and checkpoint.commit is None:  # the Hub's files are fetched only when they are needed
        last = ActivationKey(arch.num_layers - 1, Site.resid_post), ActivationKey(-1, Site.final_norm)
        everything = needed_leaves(arch, table, last)
        check_tensors(checkpoint, arch, table, everything)
    return model


def _spelled_out(arch: Architecture) -> dict[str, object]:
    """Without what is at its default, so that what one family adds does not change the others' identity."""
    everything = dataclasses.asdict(arch)
    return {
        field.name: everything[field.name]
        for field in dataclasses.fields(arch)
        if field.default is dataclasses.MISSING or getattr(arch, field.name) != field.default
    }


def _check_classes(config: HfConfig, family: Family) -> None:
    known = [family.classes + head for head in _HEADS]
    unknown = [name for name in config.strings("architectures") if name not in known]
    if unknown:
        raise CheckpointError(
            f"{config.where}: architectures is {', '.join(unknown)}; implemented are {', '.join(known)}. "
            f"Use another model."
        )
