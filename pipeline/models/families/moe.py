"""Models with experts: Qwen2-MoE, Qwen3-MoE, Mixtral, MiniMax-M2, OLMoE and gpt-oss (transformers' `Qwen2MoeModel`,
`Qwen3MoeModel`, `MixtralModel`, `MiniMaxM2Model`, `OlmoeModel`, `GptOssModel`).

Each is a dense family in which all or some MLPs are mixtures of experts. Qwen2-MoE also has a shared expert with a
gate. gpt-oss has attention sinks, and experts with biases and clipped neurons. MiniMax-M2 has Mixtral's tensors and
DeepSeek-V3's router, without groups.
"""

import dataclasses
from typing import Any

from pipeline.core.messages import shown
from pipeline.models.architecture import (
    Activation,
    Architecture,
    Experts,
    FileTensor,
    KeyTable,
    Norm,
    Router,
)
from pipeline.models.checkpoints.json_config import REQUIRED
from pipeline.models.families import llama, olmo
from pipeline.models.families.hf_attention import (
    all_local,
    every_nth_global,
    read_local,
    rope_values,
)
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.qwen import HEAD_NORMS

EXPERTS: KeyTable = {
    "layers.*.mlp.gate.weight": "mlp.router",
    "layers.*.mlp.experts.#.gate_proj.weight": "mlp.experts_gate",
    "layers.*.mlp.experts.#.up_proj.weight": "mlp.experts_up",
    "layers.*.mlp.experts.#.down_proj.weight": "mlp.experts_down",
}
SHARED: KeyTable = {
    "layers.*.mlp.shared_expert_gate.weight": "mlp.shared_router",
    "layers.*.mlp.shared_expert.gate_proj.weight": "mlp.shared_gate",
    "layers.*.mlp.shared_expert.up_proj.weight": "mlp.shared_up",
    "layers.*.mlp.shared_expert.down_proj.weight": "mlp.shared_down",
}
_MIXTRAL_EXPERTS: KeyTable = {
    "layers.*.block_sparse_moe.gate.weight": "mlp.router",
    "layers.*.block_sparse_moe.experts.#.w1.weight": "mlp.experts_gate",
    "layers.*.block_sparse_moe.experts.#.w3.weight": "mlp.experts_up",
    "layers.*.block_sparse_moe.experts.#.w2.weight": "mlp.experts_down",
}
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
_GPT_OSS: KeyTable = {
    "layers.*.self_attn.sinks": "attention.sinks",
    "layers.*.mlp.router.weight": "mlp.router",
    "layers.*.mlp.router.bias": "mlp.router_bias",
    "layers.*.mlp.experts.gate_up_proj": FileTensor(("mlp.experts_gate", "mlp.experts_up"), "E D M", by="M"),
    "layers.*.mlp.experts.gate_up_proj_bias": FileTensor(
        ("mlp.experts_gate_bias", "mlp.experts_up_bias"), "E M", by="M"
    ),
    "layers.*.mlp.experts.down_proj": FileTensor(("mlp.experts_down",), "E M D"),
    "layers.*.mlp.experts.down_proj_bias": FileTensor(("mlp.experts_down_bias",), "E D"),
}
WITHOUT_MLP = llama.table_without("mlp.gate", "mlp.up", "mlp.down")
_MINIMAX_IMPLEMENTED: dict[str, object] = {  # in published files, but transformers does not read them
    **dict.fromkeys((f"layernorm_{kind}_beta" for kind in ("full_attention", "linear_attention", "mlp")), 1.0),
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "use_qk_norm": True,
    "use_routing_bias": True,
}
TRAINING_KEYS = ("output_router_logits", "router_aux_loss_coef")


def read_qwen2_moe(config: HfConfig) -> tuple[Architecture, KeyTable]:
    arch = llama.read_decoder(config, llama.Defaults(32768))
    experts = read_experts(config, arch.num_layers, default_num=60, default_per_token=4, default_d_expert=1408)
    experts = dataclasses.replace(experts, d_shared=config.positive_int("shared_expert_intermediate_size", 5632))
    window = _read_window(config)
    first_global = min(config.count("max_window_layers", 28), arch.num_layers)
    pattern = "".join("L" if window and i % 2 == 0 and i < first_global else "G" for i in range(arch.num_layers))
    local = read_local(config, arch, pattern, window)
    biases = llama.QKV_BIASES if config.flag("qkv_bias", True) else {}
    return dataclasses.replace(arch, local=local, experts=experts), llama.KEY_TABLE | biases | EXPERTS | SHARED


def read_qwen3_moe(config: HfConfig) -> tuple[Architecture, KeyTable]:
    arch = llama.read_decoder(config, llama.Defaults(32768))
    experts = read_experts(config, arch.num_layers, default_num=128, default_per_token=8, default_d_expert=768)
    config.ignore("max_window_layers")  # in published files, without effect: a window applies to every layer
    local = all_local(arch, _read_window(config))
    table = llama.KEY_TABLE | HEAD_NORMS | EXPERTS | llama.attention_biases(config)
    return dataclasses.replace(arch, local=local, experts=experts), table


def read_mixtral(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.ignore("router_jitter_noise", *TRAINING_KEYS)  # noise is added in training only
    arch = llama.read_decoder(config, llama.Defaults(4096 * 32, eps=1e-5, theta=1e6))
    arch = dataclasses.replace(arch, local=all_local(arch, config.optional_int("sliding_window", None)))
    arch = with_experts(config, arch, 8, 2, sums_to_one=True, rounds_weights=False)
    return arch, WITHOUT_MLP | _MIXTRAL_EXPERTS


def read_minimax_m2(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.require(_MINIMAX_IMPLEMENTED)
    config.ignore("mlp_intermediate_size", "shared_moe_mode")  # of the shared expert, which has size 0
    config.ignore("router_jitter_noise", "use_mtp", "mtp_transformer_layers", *TRAINING_KEYS)
    head_dim = config.positive_int("head_dim", 128)
    fraction = config.positive_int("rotary_dim", head_dim) / head_dim
    arch = llama.read_decoder(config, llama.Defaults(196608, kv_heads=8, head_dim=128, theta=5e6, fraction=fraction))
    types = config.whole_numbers("attn_type_list")
    config.expect({*types} <= {1}, f"1 as attn_type_list of each layer, got {shown(types)}", "Use another model.")
    arch = dataclasses.replace(arch, num_ignored_layers=config.count("num_mtp_modules", 0))
    fields = dict(sums_to_one=True, router=Router.sigmoid_groups, rounds_weights=False)
    arch = with_experts(config, arch, 256, 8, **fields)
    correction = {"layers.*.block_sparse_moe.e_score_correction_bias": "mlp.router_correction"}
    return arch, WITHOUT_MLP | _MIXTRAL_EXPERTS | correction | olmo.NORMS_OVER_HEADS


def read_olmoe(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.ignore(*TRAINING_KEYS)
    arch = llama.read_decoder(config, llama.Defaults(4096, eps=1e-5))
    arch = dataclasses.replace(arch, clip_qkv=config.optional_float("clip_qkv", None))
    arch = with_experts(config, arch, 64, 8, sums_to_one=config.flag("norm_topk_prob", False))
    return arch, WITHOUT_MLP | EXPERTS | olmo.NORMS_OVER_HEADS | llama.attention_biases(config)


def read_gpt_oss(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.ignore("experts_per_token", "initial_context_length", "hidden_act", *TRAINING_KEYS)
    arch = llama.read_decoder(
        config,
        llama.Defaults(131072, kv_heads=8, head_dim=64, eps=1e-5, theta=150000.0),
        activation=Activation.silu,
        rope_config=rope_values(config, _GPT_OSS_ROPE),
    )
    arch = with_experts(
        config,
        arch,
        default_num=128,
        default_per_token=4,
        sums_to_one=True,
        router=Router.top_softmax,
        alpha=config.positive_float("swiglu_alpha", 1.702),
        limit=config.positive_float("swiglu_limit", 7.0),
    )
    pattern = every_nth_global(arch.num_layers, 2)
    local = read_local(config, arch, pattern, config.optional_int("sliding_window", 128))
    table = WITHOUT_MLP | _GPT_OSS | llama.attention_biases(config, default=True)
    return dataclasses.replace(arch, norm=Norm.rms_wide, local=local, sinks=True), table


def read_experts(
    config: HfConfig,
    num_layers: int,
    default_num: int,
    default_per_token: int,
    default_d_expert: int,
    sums_to_one: bool = False,
) -> Experts:
    """Qwen's experts, in every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
    config.ignore(*TRAINING_KEYS)
    num_experts, per_token = read_counts(config, default_num, default_per_token)
    step, dense = config.positive_int("decoder_sparse_step", 1), {*config.whole_numbers("mlp_only_layers")}
    pattern = "".join("D" if i in dense or (i + 1) % step else "S" for i in range(num_layers))
    return Experts(
        pattern,
        num_experts,
        per_token,
        config.positive_int("moe_intermediate_size", default_d_expert),
        sums_to_one=config.flag("norm_topk_prob", sums_to_one),
    )


def with_experts(
    config: HfConfig,
    arch: Architecture,
    default_num: object = REQUIRED,
    default_per_token: object = REQUIRED,
    key: str | None = None,
    per_token_key: str = "num_experts_per_tok",
    d_expert: int | None = None,
    **fields: Any,
) -> Architecture:
    """The architecture with experts in all layers, by default as large as its MLP. `fields` are those of `Experts`."""
    counts = read_counts(config, default_num, default_per_token, key, per_token_key)
    experts = Experts("S" * arch.num_layers, *counts, d_expert or arch.d_mlp, **fields)
    return dataclasses.replace(arch, experts=experts)


def stacked(
    router: str, place: str, up: str = "gate_up_proj", down: str = "down_proj", *, inputs_first: bool = False
) -> KeyTable:
    """The key table of experts that are in two tensors, each expert's gates before its ups."""
    axes, by, down_axes = ("E D M", "D", "E M D") if inputs_first else ("E M D", "E", "E D M")
    return {
        router: "mlp.router",
        f"{place}.{up}": FileTensor(("mlp.experts_gate", "mlp.experts_up"), axes, by=by),
        f"{place}.{down}": FileTensor(("mlp.experts_down",), down_axes),
    }


def _read_window(config: HfConfig) -> int | None:
    """Qwen's sliding window; None if it is not used, where transformers writes 0 or null."""
    if config.flag("use_sliding_window", False):
        return config.optional_int("sliding_window", 4096)
    config.ignore("sliding_window")
    return None


def read_counts(
    config: HfConfig,
    default_num: object = REQUIRED,
    default_per_token: object = REQUIRED,
    key: str | None = None,
    per_token_key: str = "num_experts_per_tok",
) -> tuple[int, int]:
    """The number of experts, and of experts per token. The former has one of two names, depending on the version of
    transformers, unless `key` is given."""
    key = key or ("num_local_experts" if "num_local_experts" in config else "num_experts")
    return config.positive_int(key, default_num), config.positive_int(per_token_key, default_per_token)
