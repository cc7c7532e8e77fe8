"""StableLM (transformers' `StableLmModel`): a LLaMA with LayerNorm and rotation in part; attention and MLP may be
parallel, after one norm."""

import dataclasses

from pipeline.models.architecture import Architecture, KeyTable, Norm
from pipeline.models.families import llama
from pipeline.models.families.hf_attention import read_partial_rope, rotary_dim
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.qwen import QKV_BIASES


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.require({"qk_layernorm": False})  # each head has its own norm
    config.ignore("rotary_scaling_factor")
    max_positions = config.positive_int("max_position_embeddings", 4096)
    rope, fraction = read_partial_rope(config, max_positions, 0.25)
    arch = llama.read_decoder(config, max_positions, default_kv_heads=32, rope=rope)
    arch = dataclasses.replace(
        arch,
        norm=Norm.layer,
        norm_eps=config.positive_float("layer_norm_eps", 1e-5),
        parallel=config.flag("use_parallel_residual", False),
        rotary_dim=rotary_dim(config, arch.head_dim, fraction),
    )
    table = llama.table_without("mlp.norm") if arch.parallel else llama.KEY_TABLE
    biases = {key.replace("weight", "bias"): f"{entry}_bias" for key, entry in table.items() if "norm" in key}
    return arch, table | biases | (QKV_BIASES if config.flag("use_qkv_bias", False) else {})
