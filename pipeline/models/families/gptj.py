"""GPT-J (transformers' `GPTJModel`): attention and MLP in parallel after one norm, and rotation in part, of adjacent
dimensions."""

import dataclasses

from pipeline.models.architecture import Architecture, KeyTable, Rope, RotaryPairs, biases
from pipeline.models.families import gpt2
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.multi_head import read_multi_head

_BIASED: KeyTable = {
    "h.*.ln_1.weight": "attention.norm",
    "h.*.mlp.fc_in.weight": "mlp.up",
    "h.*.mlp.fc_out.weight": "mlp.down",
    "ln_f.weight": "final_norm",
}
KEY_TABLE: KeyTable = (
    _BIASED
    | biases(_BIASED)
    | {
        "wte.weight": "embed",
        "h.*.attn.q_proj.weight": "attention.q",
        "h.*.attn.k_proj.weight": "attention.k",
        "h.*.attn.v_proj.weight": "attention.v",
        "h.*.attn.out_proj.weight": "attention.o",
    }
)


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.ignore("n_ctx", "rotary")  # in published files, but transformers does not read them
    arch = read_multi_head(
        config, max_positions=2048, eps=1e-5, activation="gelu_new", rope=Rope(10000.0), names=gpt2.NAMES
    )
    dim = config.positive_int("rotary_dim", 64)
    return dataclasses.replace(arch, parallel=True, rotary_dim=dim, rotary_pairs=RotaryPairs.adjacent), KEY_TABLE
