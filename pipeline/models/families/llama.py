"""LLaMA 2, 3 and 3.x, and the many models with its architecture (transformers' `LlamaModel`), and Seed-OSS, whose
attention has other biases (`SeedOssModel`)."""

from typing import NamedTuple

from pipeline.models.architecture import Activation, Architecture, FileTensor, KeyTable, Rope, biases
from pipeline.models.families.hf_attention import read_fraction, read_rope, rope_values
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
QKV_BIASES = biases(KEY_TABLE, "attention.q", "attention.k", "attention.v")
_OUTPUT_BIASES = biases(KEY_TABLE, "attention.o")
ATTENTION_BIASES = QKV_BIASES | _OUTPUT_BIASES
FUSED_MLP: KeyTable = {"layers.*.mlp.gate_up_proj.weight": FileTensor(("mlp.gate", "mlp.up"))}
_MLP_BIASES = biases(KEY_TABLE, "mlp.gate", "mlp.up", "mlp.down")


def table_without(*weights: str) -> KeyTable:
    """LLaMA's key table without some of our weights."""
    return {key: entry for key, entry in KEY_TABLE.items() if entry not in weights}


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    return read_decoder(config, Defaults(2048)), read_table(config)


def read_table(config: HfConfig) -> KeyTable:
    """LLaMA's key table, with the biases that config.json enables."""
    return KEY_TABLE | attention_biases(config) | (_MLP_BIASES if config.flag("mlp_bias", False) else {})


def read_seed_oss(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.ignore("residual_dropout")
    arch = read_decoder(config, Defaults(524288, kv_heads=8, head_dim=config.optional_int("head_dim", 128)))
    table = KEY_TABLE | (QKV_BIASES if config.flag("attention_bias", True) else {})
    table |= _OUTPUT_BIASES if config.flag("attention_out_bias", False) else {}
    return arch, table | (_MLP_BIASES if config.flag("mlp_bias", False) else {})


def attention_biases(config: HfConfig, default: bool = False) -> KeyTable:
    """The key table of the biases in attention; empty unless config.json enables them. `default` is the family's."""
    return ATTENTION_BIASES if config.flag("attention_bias", default) else {}


class Defaults(NamedTuple):
    """What absent attributes mean in a family: the defaults of transformers' config class."""

    max_positions: int
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    eps: float = 1e-6
    theta: float = 10000.0
    fraction: float | None = None  # of a head's dimensions that rotate; None: all, and no attribute says otherwise
    eps_key: str = "rms_norm_eps"


def read_decoder(
    config: HfConfig,
    default: Defaults,
    *,
    activation: Activation | None = None,
    rope_config: HfConfig | None = None,
    rope: Rope | None = None,
    d_mlp: int | None = None,
) -> Architecture:
    """The architecture of LLaMA and similar families.

    Families whose config.json has different attributes for them pass `activation`, `rope` or what `rope_values`
    returned as `rope_config`, and `d_mlp`.
    """
    config.ignore("rms_norm_eps")  # in some files of families that read `default.eps_key`
    d_model = config.positive_int("hidden_size")
    num_heads = config.positive_int("num_attention_heads")
    num_kv_heads = config.optional_int("num_key_value_heads", default.kv_heads) or num_heads
    head_dim = config.positive_int("head_dim", default.head_dim or max(d_model // num_heads, 1))
    max_positions = config.positive_int("max_position_embeddings", default.max_positions)
    rotary = None
    if rope is None:
        values = rope_values(config) if rope_config is None else rope_config
        if default.fraction is not None:
            rotary = int(head_dim * read_fraction(config, values, default.fraction))
        rope = read_rope(config, max_positions, default.theta, values)
    return Architecture(
        num_layers=config.num_layers("num_hidden_layers"),
        vocab_size=config.positive_int("vocab_size"),
        max_positions=max_positions,
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        d_mlp=d_mlp or config.positive_int("intermediate_size"),
        norm_eps=config.positive_float(default.eps_key, default.eps),
        rope=rope,
        rotary_dim=rotary,
        activation=activation or config.activation("hidden_act", "silu"),
    )
