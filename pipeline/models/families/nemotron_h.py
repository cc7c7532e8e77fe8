"""Nemotron-H and Nemotron Nano 2 (transformers' `NemotronHModel`): each layer is one block, with Mamba 2, attention
without rotation, or an MLP. Layers with experts (Nemotron 3) are not implemented."""

from itertools import chain

from pipeline.core.messages import shown
from pipeline.models.architecture import Architecture, DeltaNet, FileTensor, KeyTable, Norm, biases
from pipeline.models.families.hf_config import MAX_LAYERS, HfConfig

KEY_TABLE: KeyTable = {
    "embeddings.weight": "embed",
    "layers.*.norm.weight": "attention.norm",
    "layers.*.mixer.in_proj.weight": FileTensor(("delta.z", "delta.v", "delta.k", "delta.q", "delta.decay")),
    "layers.*.mixer.conv1d.weight": FileTensor(("delta.v_taps", "delta.k_taps", "delta.q_taps")),
    "layers.*.mixer.dt_bias": "delta.decay_offset",
    "layers.*.mixer.A_log": "delta.decay_log_rate",
    "layers.*.mixer.D": "delta.skip",
    "layers.*.mixer.norm.weight": FileTensor(("delta.z_norm",), "JOv"),
    "layers.*.mixer.out_proj.weight": "delta.o",
    "layers.*.mixer.q_proj.weight": "attention.q",
    "layers.*.mixer.k_proj.weight": "attention.k",
    "layers.*.mixer.v_proj.weight": "attention.v",
    "layers.*.mixer.o_proj.weight": "attention.o",
    "layers.*.mixer.up_proj.weight": "mlp.up",
    "layers.*.mixer.down_proj.weight": "mlp.down",
    "norm_f.weight": "final_norm",
}
_BIASED = {"use_bias": ("delta.z", "delta.o"), "use_conv_bias": ("delta.v_taps",), "mlp_bias": ("mlp.up", "mlp.down")}
_LETTERS = {
    **{"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"},
    **{letter: letter for letter in "M*-E"},
}
_UNUSED = (  # transformers reads none of them, or only in training, or only in layers with experts
    *("attention_bias", "chunk_size", "expand", "mamba_proj_bias", "mamba_ssm_cache_dtype", "num_hidden_layers"),
    *("num_logits_to_keep", "rescale_prenorm_residual", "residual_in_fp32", "rms_norm_eps", "use_mamba_kernels"),
    *("time_step_floor", "time_step_limit", "time_step_max", "output_router_logits", "sliding_window"),
    *("moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size", "n_group", "topk_group"),
    *("moe_shared_expert_overlap", "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok"),
    *("routed_scaling_factor", "num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
)


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.ignore(*_UNUSED)
    config.require({"tie_word_embeddings": False})
    pattern = _read_pattern(config)
    num_heads = config.positive_int("num_attention_heads", 32)
    num_kv_heads = config.optional_int("num_key_value_heads", 8) or num_heads
    head_dim = config.positive_int("head_dim", 128)
    config.require({"attention_head_dim": head_dim})
    arch = Architecture(
        num_layers=len(pattern),
        vocab_size=config.positive_int("vocab_size", 131072),
        max_positions=config.positive_int("max_position_embeddings", 4096),
        d_model=config.positive_int("hidden_size", 4096),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        d_mlp=config.positive_int("intermediate_size", 21504),
        norm_eps=config.positive_float("layer_norm_epsilon", 1e-5),
        rope=None,
        norm=Norm.rms_wide,
        activation=config.activation("mlp_hidden_act", "relu2"),
        gated=False,
        blocks="".join("F" if letter == "-" else "M" for letter in pattern),
        delta=_read_mamba(config, "".join("D" if letter == "M" else "A" for letter in pattern)),
    )
    biased = [weights for key, weights in _BIASED.items() if config.flag(key, default=key == "use_conv_bias")]
    return arch, KEY_TABLE | biases(KEY_TABLE, *chain.from_iterable(biased)) if biased else KEY_TABLE


def _read_pattern(config: HfConfig) -> str:
    """A letter per layer, as in the older `hybrid_override_pattern`."""
    names = config.strings("layers_block_type")
    older = config.text("hybrid_override_pattern")
    pattern = "".join(_LETTERS.get(name, "?") for name in names or older or "ME*-")
    config.expect(
        1 <= len(pattern) <= MAX_LAYERS and {*pattern} <= {*"M*-"},
        f"1 to {MAX_LAYERS:,} layers of mamba, attention and mlp (M, * and -), got {shown(names or older or pattern)}; "
        f"layers with experts are not implemented",
        "Use another model.",
    )
    return pattern


def _read_mamba(config: HfConfig, pattern: str) -> DeltaNet:
    config.choice("mamba_hidden_act", ("silu", "swish"), "silu")
    num_heads, num_groups = config.positive_int("mamba_num_heads", 128), config.positive_int("n_groups", 8)
    config.expect(num_heads % num_groups == 0, f"a multiple of n_groups, {num_groups}, as heads, got {num_heads}")
    return DeltaNet(
        pattern,
        num_groups,
        num_heads // num_groups,
        config.positive_int("ssm_state_size", 128),
        config.positive_int("mamba_head_dim", 64),
        config.positive_int("conv_kernel", 4),
        is_mamba=True,
        min_time=config.positive_float("time_step_min", 0.001),
    )
