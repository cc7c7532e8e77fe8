"""BERT (transformers' `BertModel`), such as MiniLM from sentence-transformers, and RoBERTa (`RobertaModel`).

Bidirectional; the residual stream itself is normalised. All tokens have type 0, as in a single text.
"""

import dataclasses

from pipeline.models.architecture import Architecture, KeyTable, biases
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.multi_head import read_multi_head

_EMBEDDINGS: KeyTable = {
    "embeddings.word_embeddings.weight": "embed",
    "embeddings.position_embeddings.weight": "position_embed",
    "embeddings.token_type_embeddings.weight": "type_embed",
}
_BIASED: KeyTable = {
    "embeddings.LayerNorm.weight": "embed_norm",
    "encoder.layer.*.attention.self.query.weight": "attention.q",
    "encoder.layer.*.attention.self.key.weight": "attention.k",
    "encoder.layer.*.attention.self.value.weight": "attention.v",
    "encoder.layer.*.attention.output.dense.weight": "attention.o",
    "encoder.layer.*.attention.output.LayerNorm.weight": "attention.sum_norm",
    "encoder.layer.*.intermediate.dense.weight": "mlp.up",
    "encoder.layer.*.output.dense.weight": "mlp.down",
    "encoder.layer.*.output.LayerNorm.weight": "mlp.sum_norm",
}
KEY_TABLE = _EMBEDDINGS | _BIASED | biases(_BIASED)

_HEAD_AND_TRAINING_KEYS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "directionality",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
)


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.ignore(*_HEAD_AND_TRAINING_KEYS)
    config.choice("position_embedding_type", ("absolute",), "absolute")
    config.require({"is_decoder": False})
    arch = read_multi_head(config, max_positions=512, eps=1e-12, activation="gelu")
    num_token_types = config.positive_int("type_vocab_size", 2)
    return dataclasses.replace(arch, causal=False, num_token_types=num_token_types), KEY_TABLE


def read_roberta(config: HfConfig) -> tuple[Architecture, KeyTable]:
    """Positions are numbered from the padding token's id + 1."""
    config.ignore("output_past")  # generation
    arch, table = read(config)
    padding = config.count("pad_token_id", 1)
    max_positions = arch.max_positions - padding - 1
    config.expect(
        max_positions > 0, f"max_position_embeddings above pad_token_id + 1, {padding + 1}, got {arch.max_positions}"
    )
    positions = {"max_positions": max_positions, "position_offset": padding + 1, "uncounted_token": padding}
    return dataclasses.replace(arch, **positions), table
