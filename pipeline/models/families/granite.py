"""Granite 3, dense and with experts (transformers' `GraniteModel`, `GraniteMoeModel`): a LLaMA with multipliers of
embeddings, attention scores, what blocks add to the stream, and logits."""

import dataclasses

from pipeline.models.architecture import Architecture, KeyTable, Router
from pipeline.models.families import llama, moe
from pipeline.models.families.hf_config import HfConfig

_BLOCK = "layers.*.block_sparse_moe"
_EXPERTS = moe.stacked(f"{_BLOCK}.router.layer.weight", _BLOCK, "input_linear.weight", "output_linear.weight")


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    return _read(config), llama.read_table(config)


def read_moe(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.ignore(*moe.TRAINING_KEYS)
    arch = moe.with_experts(
        config, _read(config), 8, 2, "num_local_experts", sums_to_one=True, router=Router.top_softmax
    )
    return arch, moe.WITHOUT_MLP | _EXPERTS | llama.attention_biases(config)


def logit_scale(config: HfConfig) -> float:
    return 1 / config.positive_float("logits_scaling", 1.0)


def _read(config: HfConfig) -> Architecture:
    return dataclasses.replace(
        llama.read_decoder(config, llama.Defaults(2048)),
        embed_scale=config.positive_float("embedding_multiplier", 1.0),
        attention_scale=config.positive_float("attention_multiplier", 1.0),
        residual_scale=config.positive_float("residual_multiplier", 1.0),
    )
