"""GPT-Neo and TinyStories (transformers' `GPTNeoModel`): learned positions, unscaled attention scores, and layers that
are global and local by turns."""

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import islice

from pipeline.core.messages import shown
from pipeline.models.architecture import Architecture, KeyTable, LocalAttention, biases
from pipeline.models.families import gpt2
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.multi_head import read_multi_head

_BIASED: KeyTable = gpt2.NORMS | {
    "h.*.attn.attention.out_proj.weight": "attention.o",
    "h.*.mlp.c_fc.weight": "mlp.up",
    "h.*.mlp.c_proj.weight": "mlp.down",
}
KEY_TABLE: KeyTable = (
    _BIASED
    | biases(_BIASED)
    | {
        "wte.weight": "embed",
        "wpe.weight": "position_embed",
        "h.*.attn.attention.q_proj.weight": "attention.q",
        "h.*.attn.attention.k_proj.weight": "attention.k",
        "h.*.attn.attention.v_proj.weight": "attention.v",
    }
)
_NAMES = {
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "hidden_act": "activation_function",
    "layer_norm_eps": "layer_norm_epsilon",
}
_LETTERS = {"global": "G", "local": "L"}


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.ignore("resid_dropout", "embed_dropout")
    arch = read_multi_head(config, max_positions=2048, eps=1e-5, activation="gelu_new", names=_NAMES)
    pattern = _read_pattern(config, arch.num_layers)
    window = config.positive_int("window_size", 256)
    local = LocalAttention(pattern, window, None) if "L" in pattern and window < arch.max_positions else None
    return dataclasses.replace(arch, attention_scale=1.0, local=local), KEY_TABLE


def _read_pattern(config: HfConfig, num_layers: int) -> str:
    """A letter per layer, as in `LocalAttention.pattern`. `attention_layers`, if it exists, takes precedence."""
    types = config.values.get("attention_types", [[["global", "local"], 12]])
    config.ignore("attention_types")
    try:
        kinds = config.strings("attention_layers") or _repeated(types)
        pattern = "".join(_LETTERS[kind] for kind in islice(kinds, num_layers + 1))
    except (KeyError, TypeError, ValueError):
        pattern = ""
    config.expect(
        len(pattern) == num_layers,
        f"lists of global and local with their numbers of repetitions as attention_types, for {num_layers} layers in "
        f"total, got {shown(types)}",
    )
    return pattern


def _repeated(types: Iterable[tuple[list[str], int]]) -> Iterator[str]:
    """The kinds of `attention_types`, which may be very many in a damaged file."""
    for kinds, repeats in types:
        for _ in range(repeats if kinds else 0):
            yield from kinds
