"""The text models of Gemma 4 (transformers' `Gemma4TextModel`, `Gemma4UnifiedTextModel`), and the language models of
its multimodal checkpoints.

Differences from Gemma 3: norms are scaled by their weight, values are normalised, and global layers have a different
head size, and may use keys as values. The small models have per-layer inputs, and last layers that share keys and
values; others have experts in addition to each MLP.
"""

import dataclasses

from pipeline.core.messages import shown
from pipeline.models.architecture import (
    Architecture,
    GlobalHeads,
    KeyTable,
    LocalAttention,
    Norm,
    Rope,
    RopeKind,
    SharedKeys,
)
from pipeline.models.families import gemma, moe
from pipeline.models.families.hf_attention import GLOBAL, LOCAL, every_nth_global, nested_ropes, read_pattern
from pipeline.models.families.hf_config import HfConfig, text_reader
from pipeline.models.families.llama import Defaults, attention_biases, read_decoder
from pipeline.models.families.qwen import HEAD_NORMS

KEY_TABLE: KeyTable = gemma.KEY_TABLE | HEAD_NORMS | {"layers.*.layer_scalar": "mlp.layer_scale"}
_LAYER_INPUTS: KeyTable = {
    "embed_tokens_per_layer.weight": "layer_embed",
    "per_layer_model_projection.weight": "layer_projection",
    "per_layer_projection_norm.weight": "layer_projection_norm",
    "layers.*.per_layer_input_gate.weight": "mlp.input_gate",
    "layers.*.per_layer_projection.weight": "mlp.input_out",
    "layers.*.post_per_layer_input_norm.weight": "mlp.input_norm",
}
_EXPERTS: KeyTable = moe.stacked("layers.*.router.proj.weight", "layers.*.experts") | {
    "layers.*.router.scale": "mlp.router_scale",
    "layers.*.router.per_expert_scale": "mlp.router_expert_scale",
    "layers.*.post_feedforward_layernorm_1.weight": "mlp.dense_post_norm",
    "layers.*.pre_feedforward_layernorm_2.weight": "mlp.mixture_norm",
    "layers.*.post_feedforward_layernorm_2.weight": "mlp.mixture_post_norm",
}


def read_unified(config: HfConfig) -> tuple[Architecture, KeyTable]:
    """Like `read`, with the defaults of the models whose images and audio have no encoder."""
    config.set_defaults(max_position_embeddings=262_144, sliding_window=1024, hidden_size_per_layer_input=0)
    return read(config)


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    max_positions = config.positive_int("max_position_embeddings", 131072)
    config.choice("use_bidirectional_attention", ("vision",), "vision")  # affects images only
    rope, local_rope = _read_ropes(config, max_positions)
    arch = read_decoder(
        config,
        Defaults(max_positions, kv_heads=4, head_dim=256),
        activation=config.activation("hidden_activation", "gelu_pytorch_tanh"),
        rope=rope,
    )
    kinds = _read_kinds(config, arch.num_layers)
    window = min(config.positive_int("sliding_window", 512), max_positions)
    arch = dataclasses.replace(
        arch,
        norm=Norm.rms_wide,
        embed_scale=arch.d_model**0.5,
        attention_scale=1.0,
        local=LocalAttention(kinds, window, local_rope) if "L" in kinds else None,
        norms_values=True,
    )
    arch = dataclasses.replace(
        arch,
        global_heads=_read_global_heads(config, arch),
        shared_keys=_read_shared_keys(config, arch, kinds),
        layer_inputs=_read_layer_inputs(config, arch),
    )
    if config.flag("enable_moe_block", False):
        d_expert = config.positive_int("moe_intermediate_size")
        fields = dict(sums_to_one=True, rounds_weights=False, beside_mlp=True)
        arch = moe.with_experts(
            config, arch, key="num_experts", per_token_key="top_k_experts", d_expert=d_expert, **fields
        )
    else:
        config.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
    table = KEY_TABLE | (_LAYER_INPUTS if arch.layer_inputs else {}) | (_EXPERTS if arch.experts else {})
    return arch, table | attention_biases(config)


def _read_ropes(config: HfConfig, max_positions: int) -> tuple[Rope, Rope]:
    """The rotary embeddings of global and of local layers."""
    if "rope_parameters" not in config:
        return Rope(1e6, RopeKind.proportional, rotating=0.25), Rope(1e4)
    return nested_ropes(config, max_positions, 1e6, 1e4, tuple(RopeKind))


def _read_kinds(config: HfConfig, num_layers: int) -> str:
    """A letter per layer: L local, G global. As in transformers, the last layer is always global."""
    return read_pattern(config, every_nth_global(num_layers, 6), {"L": LOCAL, "G": GLOBAL})[:-1] + "G"


def _read_global_heads(config: HfConfig, arch: Architecture) -> GlobalHeads | None:
    """The heads of global layers. Published files have attributes for them; files that transformers 5.23 writes have a
    mapping per layer instead."""
    keys_are_values = config.flag("attention_k_eq_v", False)
    default_dim, default_heads = config.positive_int("global_head_dim", 512), arch.num_kv_heads
    num_kv_heads = config.optional_int("num_global_key_value_heads", None)
    if num_kv_heads is not None and keys_are_values:
        default_heads = num_kv_heads
    if "per_layer_config" in config:
        default_dim, default_heads = _read_layer_configs(config, arch)
    heads = GlobalHeads(default_dim, default_heads, keys_are_values)
    return None if heads == GlobalHeads(arch.head_dim, arch.num_kv_heads, False) else heads


def _read_layer_configs(config: HfConfig, arch: Architecture) -> tuple[int, int]:
    """The head size and key-value heads of global layers. Raises CheckpointError if layers differ in other ways."""
    configs, heads = config.nested("per_layer_config"), {}
    for layer in range(arch.num_layers):
        values = configs.nested(str(layer))
        head_dim = values.positive_int("head_dim", arch.head_dim)
        heads[layer] = head_dim, values.positive_int("num_key_value_heads", arch.num_kv_heads)
        values.finish()
    configs.finish()
    local_heads = {heads[layer] for layer in heads if arch.is_local(layer)}
    global_heads = {heads[layer] for layer in heads if not arch.is_local(layer)}
    config.expect(
        local_heads <= {(arch.head_dim, arch.num_kv_heads)} and len(global_heads) == 1,
        f"the same head_dim and num_key_value_heads as per_layer_config of all global layers, and none for other "
        f"layers, got {shown(configs.values)}",
        "Use another model.",
    )
    return next(iter(global_heads))


def _read_shared_keys(config: HfConfig, arch: Architecture, kinds: str) -> SharedKeys | None:
    is_wide, num_layers = config.flag("use_double_wide_mlp", False), config.count("num_kv_shared_layers", 0)
    if not num_layers:
        return None
    has_keys = num_layers < arch.num_layers and {*kinds[: arch.num_layers - num_layers]} == {*kinds}
    config.expect(has_keys, f"a layer of each kind before the last {num_layers} layers (num_kv_shared_layers)")
    return SharedKeys(num_layers, arch.d_mlp * (2 if is_wide else 1))


def _read_layer_inputs(config: HfConfig, arch: Architecture) -> int:
    size = config.count("hidden_size_per_layer_input", 256)
    config.set_defaults(vocab_size_per_layer_input=262144)
    if size:
        config.require({"vocab_size_per_layer_input": arch.vocab_size})
    config.ignore("vocab_size_per_layer_input")
    return size


read_multimodal = text_reader("vision_soft_tokens_per_image", gemma4_text=read)
read_unified_multimodal = text_reader(gemma4_unified_text=read_unified)
