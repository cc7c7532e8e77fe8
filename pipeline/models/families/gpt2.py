"""GPT-2 (transformers' `GPT2Model`): learned positions, LayerNorm, weights stored as [in, out]."""

from pipeline.models.architecture import Architecture, FileTensor, KeyTable, biases
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.multi_head import read_multi_head

NORMS: KeyTable = {
    "h.*.ln_1.weight": "attention.norm",
    "h.*.ln_2.weight": "mlp.norm",
    "ln_f.weight": "final_norm",
}
_MATRICES: KeyTable = {
    "h.*.attn.c_attn.weight": FileTensor(("attention.qkv",), "D CNH"),
    "h.*.attn.c_proj.weight": FileTensor(("attention.o",), "NW D"),
    "h.*.mlp.c_fc.weight": FileTensor(("mlp.up",), "D F"),
    "h.*.mlp.c_proj.weight": FileTensor(("mlp.down",), "F D"),
}
KEY_TABLE: KeyTable = (
    NORMS
    | _MATRICES
    | biases(NORMS | _MATRICES)
    | {
        "wte.weight": "embed",
        "wpe.weight": "position_embed",
        "h.*.attn.c_attn.bias": FileTensor(("attention.qkv_bias",), "CNH"),
    }
)


NAMES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "layer_norm_eps": "layer_norm_epsilon",
}


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.ignore("n_ctx", "reorder_and_upcast_attn")  # n_positions applies, and scores are always float32
    return read_multi_head(config, max_positions=1024, eps=1e-5, activation="gelu_new", names=NAMES), KEY_TABLE
