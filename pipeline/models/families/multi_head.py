"""The architecture of GPT-2, GPT-NeoX and BERT: LayerNorm, an MLP without a gate, and multi-head attention."""

from collections.abc import Mapping
from types import MappingProxyType

from pipeline.models.architecture import Architecture, Norm, Rope
from pipeline.models.families.hf_config import HfConfig


def read_multi_head(
    config: HfConfig,
    *,
    max_positions: int,
    eps: float,
    activation: str,
    rope: Rope | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
) -> Architecture:
    """Reads the architecture. `max_positions`, `eps` and `activation` are the family's defaults. `names` maps the usual
    attribute names to the family's."""

    def name(key: str) -> str:
        return names.get(key, key)

    d_model = config.positive_int(name("hidden_size"))
    num_heads = config.positive_int(name("num_attention_heads"))
    return Architecture(
        num_layers=config.num_layers(name("num_hidden_layers")),
        vocab_size=config.positive_int("vocab_size"),
        max_positions=config.positive_int(name("max_position_embeddings"), max_positions),
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=d_model // num_heads,
        d_mlp=config.optional_int(name("intermediate_size"), None) or 4 * d_model,
        norm_eps=config.positive_float(name("layer_norm_eps"), eps),
        rope=rope,
        norm=Norm.layer,
        gated=False,
        activation=config.activation(name("hidden_act"), activation),
    )
