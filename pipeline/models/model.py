"""A model as the rest of the pipeline sees it: its sites and sizes, its weights, and its forward pass."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import Sharding
from jaxtyping import Array, Float, Int32, PyTree

from pipeline.core.errors import ConfigError
from pipeline.core.sites import FINAL_NORM, POST_NORM_HOOKS, UNROTATED_HOOKS, ActivationKey, Site
from pipeline.models.architecture import Architecture, KeyTable, Norm, our_keys, without_defaults
from pipeline.models.attention.spec import Attend
from pipeline.models.attention.xla import attend_xla
from pipeline.models.checkpoints.checkpoint import Checkpoint
from pipeline.models.checkpoints.loading import Placement, WeightBytes, check_tensors, load_params
from pipeline.models.checkpoints.random_weights import random_params
from pipeline.models.decoder import Params, TokenBatch, forward
from pipeline.models.head import Head, head_leaf
from pipeline.models.leaves import LeafTree, flops_per_token, needed_leaves, quantised_leaves
from pipeline.models.partition import Partition
from pipeline.models.recurrent.recur import Recur
from pipeline.models.runs import single_layers
from pipeline.models.weight_specs import TENSOR_AXES, has_site, weight_spec


@dataclass(frozen=True)
class Model:
    """A model whose config.json has been read. `load` puts its weights on the devices."""

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
        """The largest number of positions in a row."""
        return self.arch.max_positions

    @property
    def generation(self) -> "Generation":
        """What generation needs beyond a capture. Raises ConfigError for an encoder, which cannot generate."""
        if self.head is None:
            raise ConfigError(
                f"{self.checkpoint.where} is an encoder ({self.family}), which cannot generate. Use a causal model."
            )
        return Generation(self, self.head)

    @property
    def _weight_keys(self) -> set[str]:
        """Our keys of the model's weights."""
        return {key for entry in self.table.values() for key in our_keys(entry)}

    @property
    def sites(self) -> tuple[Site, ...]:
        """The model's sites, in the order of the forward pass."""
        layers = range(self.num_layers)
        missing = {site for site in Site if not any(has_site(self.arch, layer, site) for layer in layers)}
        if self.arch.parallel or self.arch.blocks:
            missing.add(Site.resid_mid)
        if not self.arch.gated:
            missing.add(Site.mlp_pre_linear)
        if "final_norm" not in self._weight_keys and self.arch.norm is not Norm.layer_plain:
            missing.add(Site.final_norm)
        return tuple(site for site in Site if site not in missing)

    def width(self, key: ActivationKey, length: int = 0) -> int:
        """The size of an activation's last axis. For `attn_pattern` it depends on `length`, the positions per row."""
        arch = self.arch.with_sizes_of(key.layer) if key.site.per_layer else self.arch
        match key.site:
            case Site.q:
                return arch.num_heads * arch.head_dim
            case Site.attn_z:
                return arch.num_heads * arch.value_dim
            case Site.k:
                return arch.num_kv_heads * arch.head_dim
            case Site.v:
                return arch.num_kv_heads * arch.value_dim
            case Site.attn_entropy:
                return arch.num_heads
            case Site.attn_pattern:
                return arch.num_heads * length
            case Site.head_out:
                return arch.num_heads * arch.d_model
            case Site.mlp_pre | Site.mlp_pre_linear | Site.mlp_post:
                return arch.d_mlp
            case Site.router_logits:
                return arch.experts.num_experts
            case Site.router_weights | Site.router_indices:
                return arch.experts.per_token
            case Site.expert_out:
                return arch.experts.per_token * arch.d_model
        return arch.d_model

    def hook_name(self, key: ActivationKey) -> str:
        """The TransformerLens hook name of the site in this family."""
        if "attention.sum_norm" in self._weight_keys:  # normalises the stream after each addition, as BERT does
            return key.hook_name(POST_NORM_HOOKS)
        is_unrotated = self.arch.rope is None or (key.site.per_layer and not self.arch.is_rotated(key.layer))
        return key.hook_name(UNROTATED_HOOKS if is_unrotated else {})

    def identity(self) -> dict[str, object]:
        """What determines the activations, as plain JSON, wherever the checkpoint is stored.

        It contains the architecture, so that a message can say how two models differ. A digest of samples
        identifies the weights, which downloads a checkpoint from the Hub.

        Raises CheckpointError for missing or damaged weights.
        """
        biases = sorted(key for key in self._weight_keys if weight_spec(key).is_bias)
        architecture = without_defaults(self.arch) | {"biases": biases}
        identity = {"family": self.family, "architecture": architecture}
        if self.random_seed is not None:
            return identity | {"init": "random", "seed": self.random_seed}
        return identity | self.checkpoint.identity | {"weights": self.checkpoint.digest}

    def weight_bytes(
        self, keys: Sequence[ActivationKey], dtype: str, quantised: str | None = None, with_head: bool = False
    ) -> WeightBytes:
        """The bytes that `load` needs, each array counted once."""
        return WeightBytes(quantised_leaves(self.leaves(keys, with_head), quantised), dtype)

    @property
    def tensor_dims(self) -> dict[str, int]:
        """The sizes that the `tensor` mesh axis divides, by their names in messages."""
        parts = frozenset().union(*(self.arch.kind(layer).parts for layer in range(self.num_layers)))
        used = (weight_spec(key) for key in self._weight_keys)
        axes = {axis for spec in used if spec.part in parts for axis in spec.logical_axes}
        return {
            name: math.gcd(*(arch.axis_size(axis) for arch in self.arch.all_sizes))
            for axis, name in TENSOR_AXES.items()
            if axis in axes
        }

    def flops_per_token(
        self,
        keys: Sequence[ActivationKey],
        length: int,
        head_share: float = 0.0,
        attention_shares: Mapping[int | None, float] | None = None,
    ) -> int:
        """Floating-point operations per token slot to capture `keys` in rows of `length`: `leaves.flops_per_token`.
        `head_share` is the share of the slots for which the head is computed."""
        layers = flops_per_token(self.arch, self.table, keys, length, attention_shares)
        return round(layers + 2 * self.arch.vocab_size * self.arch.d_model * head_share)

    def load(
        self,
        keys: Sequence[ActivationKey],
        dtype: str,
        sharding: Sharding | Placement,
        progress: bool = False,
        quantised: str | None = None,
        with_head: bool = False,
    ) -> Params:
        """Loads the parameters that `keys` need onto the devices, in `dtype` (float32 or bfloat16).

        `with_head` includes the head; `quantised` is int8 or int4 for the layers' matrices. `sharding` applies to every
        array, or is a function of the leaf, such as `Partition.leaf_sharding`.

        Raises CheckpointError, which names every missing, wrongly shaped or unexpected tensor.
        """
        return self.load_leaves(self.leaves(keys, with_head), dtype, sharding, progress, quantised)

    def load_leaves(
        self,
        needed: LeafTree,
        dtype: str,
        sharding: Sharding | Placement,
        progress: bool = False,
        quantised: str | None = None,
    ) -> PyTree[Array]:
        """Like `load`, for any subset of the result of `leaves`."""
        place, needed = sharding if callable(sharding) else lambda _: sharding, quantised_leaves(needed, quantised)
        if self.random_seed is not None:
            return random_params(needed, self.random_seed, dtype, place, progress)
        check_tensors(self.checkpoint, self.arch, self.table, needed)
        return load_params(self.checkpoint, needed, dtype, place, progress)

    def apply(
        self,
        params: Params,
        tokens: Int32[Array, "B T"],
        segments: Int32[Array, "B T"],
        positions: Int32[Array, "B T"],
        keys: Sequence[ActivationKey],
        attend: Attend | Sequence[Attend | Recur] = attend_xla,
        partition: Partition = Partition(),  # noqa: B008  frozen
    ) -> dict[ActivationKey, Float[Array, "B T width"]]:
        """The activations of `keys`, with heads concatenated. Pure, so it can be jitted. Values at padding (segment 0)
        are undefined."""
        return forward(self.arch, params, TokenBatch(tokens, segments, positions), keys, attend, partition)

    def leaves(self, keys: Sequence[ActivationKey], with_head: bool = False) -> LeafTree:
        """Describes the arrays that `load` puts on the devices, without reading them. Raises CheckpointError if an
        adapter rules out the head."""
        if with_head:
            self.checkpoint.check_head()
        head = head_leaf(self.head, self.arch) if with_head else {}
        return needed_leaves(self.arch, self.table, keys) | head


@dataclass(frozen=True)
class Generation:
    """The weights and captures needed for generation: all layers and the head."""

    model: Model
    head: Head

    def keys(self, keys: Sequence[ActivationKey] = ()) -> tuple[ActivationKey, ...]:
        """The captures of the forward pass in generation: `keys`, the head's input, and what makes each layer a run."""
        return tuple(sorted({*keys, FINAL_NORM, *single_layers([FINAL_NORM], self.model.arch)}))

    def leaves(self, keys: Sequence[ActivationKey] = ()) -> LeafTree:
        """The leaves that generation needs when it also captures `keys`, for `load_leaves`."""
        return self.model.leaves(self.keys(keys), with_head=True)

    def weight_bytes(self, dtype: str, quantised: str | None = None) -> WeightBytes:
        """The bytes of the leaves, counted as in `Model.weight_bytes`."""
        return WeightBytes(quantised_leaves(self.leaves(), quantised), dtype)

    def check_head(self) -> None:
        """Raises CheckpointError if the head is missing or has an unexpected shape. A checkpoint on the Hub is not
        checked here, but in `load_leaves`."""
        model = self.model
        if model.random_seed is None and model.checkpoint.commit is None:
            check_tensors(model.checkpoint, model.arch, model.table, head_leaf(self.head, model.arch))
