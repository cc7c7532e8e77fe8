"""LLaMA 2, 3 and 3.x, and the many models with its architecture (transformers' `LlamaModel`)."""

from pipeline.core.errors import CheckpointError
from pipeline.models.architecture import Activation, Architecture, KeyTable, Rope
from pipeline.models.families.hf_attention import read_rope
from pipeline.models.families.hf_config import HfConfig

KEY_TABLE: KeyTable = {
    "embed_tokens.weight": "embed",
    "layers.*.input_layernorm.weight": "attention.norm",
    "layers.*.self_attn.q_proj.weight": "attention.q",
    "layers.*.self_attn.k_proj.weight": "attention.k",
    "layers.*.self_attn.v_proj.weight": "attention.v",
    "layers.*.self_attn.o_proj.weight": "attention.o",
    "layers.*.post_attention_layernorm.weight": "mlp.norm",
    "layers.*.mlp.gate_proj.weight": "mlp.gate",
    "layers.*.mlp.up_proj.weight": "mlp.up",
    "layers.*.mlp.down_proj.weight": "mlp.down",
    "norm.weight": "final_norm",
}

ATTENTION_BIASES: KeyTable = {
    "layers.*.self_attn.q_proj.bias": "attention.q_bias",
    "layers.*.self_attn.k_proj.bias": "attention.k_bias",
    "layers.*.self_attn.v_proj.bias": "attention.v_bias",
    "layers.*.self_attn.o_proj.bias": "attention.o_bias",
}

MLP_BIASES: KeyTable = {
    "layers.*.mlp.gate_proj.bias": "mlp.gate_bias",
    "layers.*.mlp.up_proj.bias": "mlp.up_bias",
    "layers.*.mlp.down_proj.bias": "mlp.down_bias",
}


def table_without(*weights: str) -> KeyTable:
    """LLaMA's key table without some of our weights."""
    return {key: entry for key, entry in KEY_TABLE.items() if entry not in weights}


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    return read_decoder(config, default_max_positions=2048), read_table(config)


def read_table(config: HfConfig) -> KeyTable:
    """LLaMA's key table, with the biases that config.json enables."""
    return KEY_TABLE | attention_biases(config) | (MLP_BIASES if config.flag("mlp_bias", False) else {})


def attention_biases(config: HfConfig, default: bool = False) -> KeyTable:
    """The key table of the biases in attention; empty unless config.json enables them. `default` is the family's."""
    return ATTENTION_BIASES if config.flag("attention_bias", default) else {}


def read_decoder(
    config: HfConfig,
    default_max_positions: int,
    *,
    default_kv_heads: int | None = None,
    default_head_dim: int | None = None,
    default_eps: float = 1e-6,
    activation: Activation | None = None,
    rope: Rope | None = None,
    d_mlp: int | None = None,
) -> Architecture:
    """The architecture of LLaMA and similar families. The defaults are those of transformers' config classes.

    Families whose config.json has different attributes for them pass `activation`, `rope` and `d_mlp`.
    """
    d_model = config.positive_int("hidden_size")
    num_heads = config.positive_int("num_attention_heads")
    num_kv_heads = config.optional_int("num_key_value_heads", default_kv_heads) or num_heads
    head_dim = config.positive_int("head_dim", default_head_dim or max(d_model // num_heads, 1))
    if num_heads % num_kv_heads or head_dim % 2 or ("head_dim" not in config and d_model % num_heads):
        raise CheckpointError(
            f"{config.where}: expected num_key_value_heads to divide num_attention_heads, and an even head size that "
            f"divides hidden_size if head_dim is not set, got hidden_size {d_model}, num_attention_heads {num_heads}, "
            f"num_key_value_heads {num_kv_heads}, head_dim {head_dim}. Is the file damaged?"
        )
    max_positions = config.positive_int("max_position_embeddings", default_max_positions)
    return Architecture(
        num_layers=config.num_layers("num_hidden_layers"),
        vocab_size=config.positive_int("vocab_size"),
        max_positions=max_positions,
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        d_mlp=d_mlp or config.positive_int("intermediate_size"),
        norm_eps=config.positive_float("rms_norm_eps", default_eps),
        rope=rope or read_rope(config, max_positions),
        activation=activation or config.activation("hidden_act", "silu"),
    )
