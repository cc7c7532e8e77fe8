"""Sites: the named places of a transformer whose activations can be captured.

The names are TransformerLens' hook names without the `hook_` prefix, but for `attn_in` and `mlp_in`. The table in
docs/running.md has the meaning, the width and TransformerLens' name of each for a pre-norm decoder (Qwen2, LLaMA).

D features of the residual stream, N heads of H features, K key-value heads, F neurons, E experts of which a token has
A, T the length of a row. The heads of `q`, `k`, `v` and `attn_z` lie side by side in one axis: head n of a site is
[n * H, (n + 1) * H). So do those of `head_out`, [n * D, (n + 1) * D); their sum, plus the projection's bias, is
`attn_out` before any norm. Head n of `attn_pattern` is [n * T, (n + 1) * T): the attention to the token with the
position 0, 1, ... in the query's own window of its document, wherever this stands in the row; then zeros.

HF's `hidden_states[-1]` is `final_norm`, not the last layer's `resid_post`. TransformerLens' `ln_final.hook_normalized`
is before the norm's weight; `final_norm` here is after it, as in HF. `attn_entropy` is the entropy of the pattern, one
number per head.

`attn_in` and `mlp_in` are after the norm's weight and bias: `attn.hook_in` and `mlp.hook_in` of TransformerLens 3. Its
similar names mean something else: `hook_attn_in` and `hook_mlp_in` are the stream before the norm, and
`ln1.hook_normalized` and `ln2.hook_normalized` are before the norm's weights (before 3.0, after those of a LayerNorm).
`mlp_pre` and `mlp_pre_linear` include their projections' biases, as in HF.

Other families mean the same by these names, but for:

* Latent attention (DeepSeek): heads of `v` and `attn_z` have `v_head_dim` features, those of `q` and `k`
  `qk_nope_head_dim + qk_rope_head_dim`, of which the last rotate. `k` is what the queries meet, each head with its copy
  of the part that heads share.
* Experts (DeepSeek, GLM-4.5, Granite, MiniMax-M2, Mixtral, OLMoE, Qwen-MoE, gpt-oss): a sparse layer has no `mlp_pre`,
  `mlp_pre_linear` and `mlp_post`, a dense one none of `router_*` and `expert_out`. `expert_out` has the token's experts
  side by side, in the order of `router_indices`, which are stored as int32. `mlp_out` is their sum by `router_weights`,
  and includes the expert that all tokens share. TransformerLens has none of these hooks but `hook_expert_indices`.
  DeepSeek-V3, GLM-4.5 and MiniMax-M2 choose experts by the sigmoids of `router_logits` plus corrections;
  `router_weights` are without the corrections.
* Experts beside an MLP (Gemma 4's, where it has experts): all sites of both. `mlp_in` is what the MLP reads; the router
  and the experts read the stream through norms of their own. `mlp_out` is what both add.
* Keys of another layer (the last layers of Gemma 4's small models): there is no `k` and `v`, since the layer attends to
  an earlier one's. `resid_post` is after the token's vector for the layer was added, and after the layer's scale; heads
  of global layers may be wider, and fewer of `k` and `v`, than those of local layers.
* Gated DeltaNet (Qwen3.5, Qwen3-Next): a layer with one in place of attention has no `q`, `k`, `v`, `attn_entropy`,
  `attn_pattern`, `attn_z` and `head_out`; `attn_in` and `attn_out` are what it reads and adds. In the layers with
  attention `attn_z` is after each head's gate, so that `head_out` still adds up to `attn_out`.
* Short convolutions (LFM2) and Mamba 2 (Nemotron-H): as with a DeltaNet, there are only `attn_in` and `attn_out`.
* Layers of one block (Nemotron-H): there is no `resid_mid`. A layer with an MLP has no `attn_in` and `attn_out`, the
  others no `mlp_in` and `mlp_out`.
* Attention sinks (gpt-oss): `attn_entropy` counts a head's sink as one of the keys; `attn_pattern` is without it, so
  its sum is less than 1.
* Norms after a block (EXAONE 4, OLMo 2 and 3, Gemma, GLM-4): `attn_out` and `mlp_out` are what is added, so after
  those norms. All but Gemma and GLM-4 have none before: `attn_in` is `resid_pre`, and `mlp_in` is `resid_mid`.
* Parallel residual (GPT-NeoX, Pythia, GPT-J, Phi-2, Command R): attention and MLP both read `resid_pre`, so there is no
  `resid_mid`. In GPT-NeoX each has its own norm; in the others they share one, and `mlp_in` is `attn_in`.
* Multipliers (Granite): `attn_out` and `mlp_out` are what is added, so after the multiplier; `head_out` and
  `expert_out` are before it.
* MLP without gate (GPT-2, GPT-J, GPT-Neo, GPT-NeoX, OPT, Phi-2, StarCoder2, BERT): there is no `mlp_pre_linear`.
* No rotation (GPT-2, GPT-Neo, OPT, BERT, every fourth layer of SmolLM3, Command R7B, EXAONE 4 32B and Llama 4): `q`
  and `k` are `attn.hook_q` and `attn.hook_k`.
* Queries scaled by position (Ministral 3, Llama 4): `q` includes the scale. Llama 4 normalises `q` and `k` after their
  rotation; its experts read their inputs times `router_weights`, so `mlp_out` is the plain sum of `expert_out`, plus
  the expert that all tokens share.
* YaRN and LongRoPE (DeepSeek, OLMo 3, Phi-4-mini, gpt-oss): what rotates of `q` and `k` is also multiplied by the
  attention factor.
* Learned positions (GPT-2, GPT-Neo, OPT, BERT): `embed` includes them. It is `blocks.0.hook_resid_pre` and, after the
  embeddings' LayerNorm, `hook_full_embed` of BERT.
* Post-norm (BERT): the stream itself is normed after each addition. `resid_mid` and `resid_post` are after those norms,
  as in HF, where the latter is a layer's output: `hook_mlp_in` and `hook_normalized_resid_post`. `attn_out` and
  `mlp_out` are before the addition. What a block reads is the stream: `attn_in` is `resid_pre`, `mlp_in` is
  `resid_mid`. There is no `final_norm`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from pipeline.core.errors import ArgumentError
from pipeline.core.messages import shown


class Site(StrEnum):
    """A named place of a transformer. `embed` and `final_norm` exist once, the others once per layer."""

    embed = "embed"
    resid_pre = "resid_pre"
    attn_in = "attn_in"
    q = "q"
    k = "k"
    v = "v"
    attn_entropy = "attn_entropy"
    attn_pattern = "attn_pattern"
    attn_z = "attn_z"
    head_out = "head_out"
    attn_out = "attn_out"
    resid_mid = "resid_mid"
    mlp_in = "mlp_in"
    router_logits = "router_logits"
    router_weights = "router_weights"
    router_indices = "router_indices"
    expert_out = "expert_out"
    mlp_pre = "mlp_pre"
    mlp_pre_linear = "mlp_pre_linear"
    mlp_post = "mlp_post"
    mlp_out = "mlp_out"
    resid_post = "resid_post"
    final_norm = "final_norm"

    @property
    def per_layer(self) -> bool:
        return self not in (Site.embed, Site.final_norm)

    def stored_dtype(self, dtype: str) -> str:
        """The dtype in a store whose activations have `dtype`: indices stay integers."""
        return "int32" if self is Site.router_indices else dtype


_HOOKS = {
    Site.attn_in: "attn.hook_in",
    Site.q: "attn.hook_rot_q",
    Site.k: "attn.hook_rot_k",
    Site.v: "attn.hook_v",
    Site.attn_entropy: "attn.hook_pattern",
    Site.attn_pattern: "attn.hook_pattern",
    Site.attn_z: "attn.hook_z",
    Site.head_out: "attn.hook_result",
    Site.mlp_in: "mlp.hook_in",
    Site.router_logits: "mlp.hook_router_logits",
    Site.router_weights: "mlp.hook_router_weights",
    Site.router_indices: "mlp.hook_expert_indices",
    Site.expert_out: "mlp.hook_expert_out",
    Site.mlp_pre: "mlp.hook_pre",
    Site.mlp_pre_linear: "mlp.hook_pre_linear",
    Site.mlp_post: "mlp.hook_post",
    Site.final_norm: "ln_final.hook_normalized",
}
_SITES = {hook: site for site, hook in _HOOKS.items()}  # attn.hook_pattern is attn_pattern, the later one
UNROTATED_HOOKS = {
    Site.embed: "blocks.0.hook_resid_pre",
    Site.q: "attn.hook_q",
    Site.k: "attn.hook_k",
}
POST_NORM_HOOKS = UNROTATED_HOOKS | {
    Site.embed: "hook_full_embed",
    Site.resid_mid: "hook_mlp_in",
    Site.resid_post: "hook_normalized_resid_post",
}


@dataclass(frozen=True, order=True)
class ActivationKey:
    """One captured activation. `layer` is -1 for the sites that exist once (`embed`, `final_norm`)."""

    layer: int
    site: Site

    def __post_init__(self) -> None:
        if self.site.per_layer != (self.layer >= 0):
            raise ValueError(f"site {self.site} with layer {self.layer}")

    @property
    def name(self) -> str:
        """The array's name in the store: `blocks.5.resid_post`, `embed`, `final_norm`."""
        return f"blocks.{self.layer}.{self.site}" if self.site.per_layer else str(self.site)

    def hook_name(self, family_hooks: Mapping[Site, str] = MappingProxyType({})) -> str:
        """TransformerLens' name of the same place; `family_hooks` are those that differ from the table's."""
        hook = (_HOOKS | family_hooks).get(self.site, f"hook_{self.site}")
        return f"blocks.{self.layer}.{hook}" if self.site.per_layer else hook

    @classmethod
    def parse(cls, name: str) -> "ActivationKey":
        """The inverse of `name`."""
        parts = name.split(".")
        if len(parts) == 3 and parts[0] == "blocks":
            return cls(int(parts[1]), Site(parts[2]))
        return cls(-1, Site(name))


def site_name(name: str) -> str:
    """Our name of a site that may be given as TransformerLens' hook, such as hook_resid_post or attn.hook_z. Any other
    name is returned unchanged, also a hook that is another place (hook_mlp_in)."""
    plain = name.removeprefix("hook_")
    return str(_SITES.get(name) or (plain if plain in list(Site) and Site(plain) not in _HOOKS else name))


def spelled(given: object) -> str:
    """The name of an array that a user gives as a name or an ActivationKey. Raises ArgumentError for anything else."""
    if isinstance(given, ActivationKey):
        return given.name
    if not isinstance(given, str):
        raise ArgumentError(f"expected a name such as 'blocks.2.resid_post', got {shown(given)}.")
    return given


def find_array(name: str, hooks: Mapping[str, str]) -> str | None:
    """The array that a user's name means: blocks.2.resid_post, 2.resid_post, TransformerLens' blocks.2.hook_resid_post,
    or one of these without the layer. None if no array has it, or several do.

    hooks: TransformerLens' name by array name.
    """
    if name in hooks:
        return name
    spellings = [(array, array) for array in hooks]
    spellings += [pair for pair in hooks.items() if Site.attn_entropy not in pair[0]]  # its hook is the pattern
    found = {array for array, spelling in spellings if name in _endings(spelling)}
    return found.pop() if len(found) == 1 else None


class ByName(dict):
    """A dict by array name, which also finds an array by whatever else `find_array` takes."""

    def __missing__(self, key: object) -> Any:
        hooks = {name: ActivationKey.parse(name).hook_name() for name in self}
        if (name := find_array(spelled(key), hooks)) is None:
            raise KeyError(key)
        return self[name]


def _endings(name: str) -> list[str]:
    """A name, and what is left of it without `blocks`, and without the layer."""
    return [name, *name.split(".", 1)[1:], *name.split(".", 2)[2:]] if name.startswith("blocks.") else [name]


FINAL_NORM = ActivationKey(-1, Site.final_norm)  # what the head reads


def activation_keys(layers: tuple[int, ...], sites: tuple[Site, ...]) -> tuple[ActivationKey, ...]:
    """Every captured activation, in the order in which the forward pass produces them."""
    keys = {ActivationKey(layer, site) for site in sites if site.per_layer for layer in layers}
    keys |= {ActivationKey(-1, site) for site in sites if not site.per_layer}
    order = list(Site)
    return tuple(sorted(keys, key=lambda key: (key.site is Site.final_norm, key.layer, order.index(key.site))))
