"""StableLM (transformers' `StableLmModel`): a LLaMA with LayerNorm and rotation in part; attention and MLP may be
parallel, after one norm."""

import dataclasses

from pipeline.models.architecture import Architecture, KeyTable, Norm, biases
from pipeline.models.families import llama
from pipeline.models.families.hf_config import HfConfig


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.require({"qk_layernorm": False})  # each head has its own norm
    config.ignore("rotary_scaling_factor")
    arch = llama.read_decoder(
        config, llama.Defaults(4096, kv_heads=32, fraction=0.25, eps_key="layer_norm_eps", eps=1e-5)
    )
    arch = dataclasses.replace(arch, norm=Norm.layer, parallel=config.flag("use_parallel_residual", False))
    table = llama.table_without("mlp.norm") if arch.parallel else llama.KEY_TABLE
    table = table | biases(table, "attention.norm", "mlp.norm", "final_norm")
    return arch, table | (llama.QKV_BIASES if config.flag("use_qkv_bias", False) else {})
