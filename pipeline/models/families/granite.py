"""Granite 3, dense and with experts (transformers' `GraniteModel`, `GraniteMoeModel`): a LLaMA with multipliers of
embeddings, attention scores, what blocks add to the stream, and logits."""

import dataclasses

from pipeline.models.architecture import Architecture, Experts, FileTensor, KeyTable, Router
from pipeline.models.families import llama, moe
from pipeline.models.families.hf_config import HfConfig

_EXPERTS: KeyTable = {
    "layers.*.block_sparse_moe.router.layer.weight": "mlp.router",
    "layers.*.block_sparse_moe.input_linear.weight": FileTensor(
        ("mlp.experts_gate", "mlp.experts_up"), "E M D", by="E"
    ),
    "layers.*.block_sparse_moe.output_linear.weight": FileTensor(("mlp.experts_down",), "E D M"),
}


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    return _read(config), llama.read_table(config)


def read_moe(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.ignore(*moe.TRAINING_KEYS)
    arch = _read(config)
    num_experts, per_token = moe.read_counts(config, arch.num_layers, 8, 2, "num_local_experts")
    experts = Experts(
        "S" * arch.num_layers, num_experts, per_token, arch.d_mlp, sums_to_one=True, router=Router.top_softmax
    )
    table = moe.WITHOUT_MLP | _EXPERTS | llama.attention_biases(config)
    return dataclasses.replace(arch, experts=experts), table


def logit_scale(config: HfConfig) -> float:
    return 1 / config.positive_float("logits_scaling", 1.0)


def _read(config: HfConfig) -> Architecture:
    return dataclasses.replace(
        llama.read_decoder(config, default_max_positions=2048),
        embed_scale=config.positive_float("embedding_multiplier", 1.0),
        attention_scale=config.positive_float("attention_multiplier", 1.0),
        residual_scale=config.positive_float("residual_multiplier", 1.0),
    )
