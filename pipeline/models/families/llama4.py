"""The text models of Llama 4 (transformers' `Llama4TextModel`), and the language models of its multimodal checkpoints.

Most layers attend within chunks of a document, and rotate queries and keys, which they then normalise. The other layers
attend to the whole document without rotation, and scale queries by their positions. All or every second MLP is sparse.
"""

import dataclasses

from pipeline.models.architecture import (
    Architecture,
    Experts,
    KeyTable,
    LocalAttention,
    QueryScaling,
    RotaryPairs,
    Router,
)
from pipeline.models.families import llama, moe
from pipeline.models.families.hf_attention import GLOBAL, read_pattern
from pipeline.models.families.hf_config import HfConfig, text_reader
from pipeline.models.families.smollm3 import read_rotation

CHUNKED = "chunked_attention"

KEY_TABLE: KeyTable = {
    **{key.replace(".mlp.", ".feed_forward."): entry for key, entry in llama.KEY_TABLE.items()},
    **moe.stacked("layers.*.feed_forward.router.weight", "layers.*.feed_forward.experts", inputs_first=True),
    "layers.*.feed_forward.shared_expert.gate_proj.weight": "mlp.shared_gate",
    "layers.*.feed_forward.shared_expert.up_proj.weight": "mlp.shared_up",
    "layers.*.feed_forward.shared_expert.down_proj.weight": "mlp.shared_down",
}


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.ignore("for_llm_compressor", "router_jitter_noise", *moe.TRAINING_KEYS)
    arch = llama.read_decoder(
        config,
        llama.Defaults(131072, kv_heads=8, head_dim=128, eps=1e-5, theta=5e5),
        d_mlp=config.positive_int("intermediate_size_mlp", 16384),
    )
    rotation = read_rotation(config, arch.num_layers)
    arch = dataclasses.replace(
        arch,
        rotary_pairs=RotaryPairs.adjacent,
        rotation=rotation,
        norms_rotated=config.flag("use_qk_norm", True),
        query_scaling=_read_scaling(config),
        local=_read_local(config, arch, rotation),
        experts=_read_experts(config, arch.num_layers),
    )
    return arch, KEY_TABLE | llama.attention_biases(config)


def _read_scaling(config: HfConfig) -> QueryScaling | None:
    scale, period = config.positive_float("attn_scale", 0.1), config.positive_int("floor_scale", 8192)
    key = "attn_temperature_tuning"
    is_int = type(config.values.get(key)) is int  # 4 in files that transformers 4.51 wrote
    is_scaled = config.count(key) > 0 if is_int else config.flag(key, True)
    return QueryScaling(scale, period, shift=1, of_rotated=False) if is_scaled else None


def _read_local(config: HfConfig, arch: Architecture, rotation: str) -> LocalAttention | None:
    pattern = read_pattern(config, rotation.translate(str.maketrans("RN", "LG")), {"L": CHUNKED, "G": GLOBAL})
    size = config.positive_int("attention_chunk_size", 8192)
    if "L" not in pattern or size >= arch.max_positions:
        return None
    return LocalAttention(pattern, size, arch.rope, chunked=True)


def _read_experts(config: HfConfig, num_layers: int) -> Experts:
    step = config.positive_int("interleave_moe_layer_step", 1)
    sparse = config.whole_numbers("moe_layers") if "moe_layers" in config else range(step - 1, num_layers, step)
    num_experts, per_token = moe.read_counts(config, 16, 1, key="num_local_experts")
    d_expert = config.positive_int("intermediate_size", 8192)
    return Experts(
        "".join("S" if layer in sparse else "D" for layer in range(num_layers)),
        num_experts,
        per_token,
        d_expert,
        sums_to_one=False,
        router=Router.sigmoid,
        d_shared=d_expert,
        scales_inputs=True,
    )


read_multimodal = text_reader(llama4_text=read)
