"""StarCoder2 (transformers' `Starcoder2Model`): a LLaMA with LayerNorm, biases and an MLP without a gate; it may have a
window in every layer."""

import dataclasses

from pipeline.models.architecture import Architecture, KeyTable, Norm, biases
from pipeline.models.families.hf_attention import all_local
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.llama import ATTENTION_BIASES, Defaults, read_decoder, table_without

_MLP: KeyTable = {"layers.*.mlp.c_fc.weight": "mlp.up", "layers.*.mlp.c_proj.weight": "mlp.down"}
_TABLE = table_without("mlp.gate", "mlp.up", "mlp.down") | _MLP
_NORM_BIASES = biases(_TABLE, "attention.norm", "mlp.norm", "final_norm")
_BIASES = ATTENTION_BIASES | biases(_MLP)


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.ignore("residual_dropout", "embedding_dropout")
    # In published files, but not read by transformers:
    config.ignore("activation_function", "attention_softmax_in_fp32")
    config.ignore("layer_norm_epsilon", "scale_attention_softmax_in_fp32")
    config.require({"mlp_type": "default", "norm_type": "layer_norm"})
    activation = config.activation("hidden_act", "gelu_pytorch_tanh")
    arch = read_decoder(config, Defaults(4096, kv_heads=2, eps_key="norm_epsilon", eps=1e-5), activation=activation)
    local = all_local(arch, config.optional_int("sliding_window", None))
    table = _TABLE | _NORM_BIASES | (_BIASES if config.flag("use_bias", True) else {})
    return dataclasses.replace(arch, norm=Norm.layer, gated=False, local=local), table
