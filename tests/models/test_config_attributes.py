"""No attribute of config.json is overlooked: a change is refused, gives another model, or is known not to matter.

Absent and null attributes mean what they mean in transformers.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from huggingface_hub.errors import StrictDataclassError
from test_parity import (
    ALTERNATING,
    FAMILIES,
    LONG_ROPE,
    MSCALE_ROPE,
    MULTIPLIERS,
    SECTIONS,
    WINDOW,
    WITH_VISION,
    YARN_ROPE,
    YARN_ROPES,
)

from pipeline.core.errors import CheckpointError
from pipeline.models.registry import open_model
from tests.models.hf_reference import ENCODERS, PLACES, tiny_config

pytestmark = pytest.mark.heavy
VARIANTS = FAMILIES | {  # as many attributes as can have a meaning at once
    "cohere": {"rope_parameters": YARN_ROPE},
    "cohere2": {"sliding_window": 7, "layer_types": ALTERNATING},
    "deepseek_v2": FAMILIES["deepseek_v2"] | {"rope_parameters": MSCALE_ROPE},
    "exaone4": {"sliding_window": 7, "layer_types": ALTERNATING, "rope_parameters": YARN_ROPE},
    "gemma3_text": FAMILIES["gemma3_text"] | {"rope_parameters": YARN_ROPES},
    "glm4": {"rope_parameters": YARN_ROPE | {"partial_rotary_factor": 0.75}},
    "gpt_oss": FAMILIES["gpt_oss"] | {"attention_bias": False},
    "granite": MULTIPLIERS | {"rope_parameters": YARN_ROPE},
    "llama": {"rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "olmo": FAMILIES["olmo"] | {"rope_parameters": YARN_ROPE},
    "olmo3": {"sliding_window": 7, "layer_types": ALTERNATING, "rope_parameters": YARN_ROPES},
    "phi": {"rope_parameters": YARN_ROPE | {"partial_rotary_factor": 0.75}},
    "phi3": {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 96, "sliding_window": 7},
    "qwen2": WINDOW | {"layer_types": ALTERNATING, "rope_parameters": LONG_ROPE},
    "qwen2_moe": WINDOW,
    **dict.fromkeys(("qwen2_5_vl", "qwen2_vl"), WINDOW | {"layer_types": ALTERNATING, "rope_parameters": SECTIONS}),
    "qwen3_moe": WINDOW,
    "qwen3_5_moe_text": {},
    "qwen3": WINDOW | {"layer_types": ALTERNATING},
    "smollm3": WINDOW | {"layer_types": ALTERNATING},
}
IN_TEXT = {"text_config.architectures", "text_config.rope_parameters.mrope_section"}
NOT_READ_BY_ENCODERS = frozenset({"attention_probs_dropout_prob", "hidden_dropout_prob", "tie_word_embeddings"})
ROUTERS_IN_TRAINING = {"output_router_logits", "router_aux_loss_coef"}
REFUSED_BY_TRANSFORMERS = (StrictDataclassError, AttributeError, KeyError, TypeError, ValueError)
LLAMA4 = ROUTERS_IN_TRAINING | {"router_jitter_noise", "interleave_moe_layer_step", "no_rope_layer_interval"}
LLAMA4 |= {"moe_layers"}  # whose order does not matter
NOT_READ_BY_NEMOTRON_H = {
    *("attention_bias", "chunk_size", "expand", "mamba_proj_bias", "mamba_ssm_cache_dtype", "num_logits_to_keep"),
    *("rescale_prenorm_residual", "residual_in_fp32", "use_mamba_kernels", "sliding_window", "time_step_floor"),
    *("time_step_limit", "time_step_max", "output_router_logits", "num_nextn_predict_layers", "mtp_layers_block_type"),
    *("moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size", "n_routed_experts"),
    *("moe_shared_expert_overlap", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "n_group"),
    *("topk_group", "routed_scaling_factor"),
}
HARMLESS = {  # in every family that has them: neither weights nor what the model computes at inference
    *("_name_or_path", "_sliding_window_pattern", "dtype", "transformers_version", "use_cache", "vision_config"),
    *("id2label", "label2id", "output_attentions", "output_hidden_states", "problem_type", "return_dict"),
    *("attention_dropout", "attn_pdrop", "classifier_dropout", "embd_pdrop", "hidden_dropout", "resid_pdrop"),
    *("initializer_range", "pretraining_tp", "summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
    *("summary_type", "summary_use_proj", "audio_token_id", "boa_token_id", "boi_token_id", "boi_token_index"),
    *("bos_token_id", "eoa_token_index", "eoi_token_id", "eoi_token_index", "eos_token_id", "image_token_id"),
    *("image_token_index", "pad_token_id", "video_token_id", "vision_end_token_id", "vision_start_token_id"),
}
IGNORED = {  # not read by transformers' model at inference, or not with the variant's other attributes
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), ROUTERS_IN_TRAINING & {"output_router_logits"}),
    "deepseek_v32": {"first_k_dense_replace", "index_head_dim", "index_n_heads", "max_position_embeddings"}
    | {"output_router_logits"},
    **dict.fromkeys(ENCODERS, NOT_READ_BY_ENCODERS),
    "glm4_moe": ROUTERS_IN_TRAINING & {"output_router_logits"},
    "gemma3": {"mm_tokens_per_image", "text_config.architectures", "text_config.tie_word_embeddings"},
    "gemma4_unified": {"audio_config", "text_config.architectures", "text_config.tie_word_embeddings"},
    "gpt2": {"reorder_and_upcast_attn"},
    "gpt_neo": {"attention_types", "embed_dropout", "resid_dropout"},
    "gpt_neox": {"is_decoder"},
    "granitemoe": ROUTERS_IN_TRAINING,
    "gpt_oss": ROUTERS_IN_TRAINING | {"hidden_act"},
    **dict.fromkeys(("minimax_m2", "mixtral"), ROUTERS_IN_TRAINING | {"router_jitter_noise"}),
    "llama4": {f"text_config.{name}" for name in LLAMA4 | {"architectures"}} | {"tie_word_embeddings"},
    "llama4_text": LLAMA4,
    "mistral3": {"multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "vision_feature_layer"}
    | {"text_config.architectures"},
    "lfm2": {"full_attn_idxs"},
    "nemotron_h": NOT_READ_BY_NEMOTRON_H,
    "olmoe": ROUTERS_IN_TRAINING,
    "opt": {"dropout", "init_std", "layerdrop"},
    "phi3": {"rope_parameters.original_max_position_embeddings"},
    "qwen2": {"max_window_layers"},
    "qwen2_moe": ROUTERS_IN_TRAINING | {"max_window_layers"},
    **dict.fromkeys(("qwen2_5_vl", "qwen2_vl"), IN_TEXT | {"text_config.max_window_layers"}),
    "qwen3_vl": IN_TEXT,
    "qwen3_vl_moe": IN_TEXT | {f"text_config.{name}" for name in ROUTERS_IN_TRAINING | {"tie_word_embeddings"}},
    "qwen3": {"max_window_layers"},
    **dict.fromkeys(("qwen3_moe", "qwen3_next", "qwen3_5_moe_text"), ROUTERS_IN_TRAINING),
    "exaone4": {"sliding_window_pattern"},
    "seed_oss": {"residual_dropout"},
    "smollm3": {"no_rope_layer_interval"},
    "starcoder2": {"embedding_dropout", "residual_dropout"},
}


OTHER_PARTS = ("vision_config", "audio_config")  # which the program does not read
ALL_FAMILIES = [pytest.param(family, marks=[pytest.mark.slow] if family in WITH_VISION else []) for family in PLACES]


def changes(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Yields other values of an attribute with its key. The key of a value in a mapping is dotted."""
    match value:
        case bool():
            yield key, not value
        case int() | float():
            yield key, value * 2 or 1
        case str():
            yield key, f"{value}_2"
        case None:
            yield from ((key, other) for other in (1, True, "x", ["x"]))
        case []:
            yield key, [1]
        case list():
            yield from ((key, other) for other in (value[1:], [*value[1:], value[0]]) if other != value)
        case dict():
            yield f"{key}.other", value | {"other": 1}
            for name, inner in value.items():
                yield from ((path, value | {name: other}) for path, other in changes(f"{key}.{name}", inner))


def opened(path: Path, config: Mapping[str, object]) -> tuple:
    (path / "config.json").write_text(json.dumps(config))
    model = open_model(str(path), init="random")
    return model.family, model.arch, model.table, model.head


def expected_model(path: Path, config: Mapping[str, object]) -> tuple | CheckpointError:
    try:
        return opened(path, config)
    except CheckpointError as error:
        return error


@pytest.mark.parametrize("family", PLACES)
def test_no_attribute_is_overlooked(family: str, tmp_path) -> None:
    config = tiny_config(family, **VARIANTS[family]).to_dict() | {"something_new": None}
    before = opened(tmp_path, config)
    overlooked = set()
    for key, before_change in config.items():
        for path, value in changes(key, before_change):
            with suppress(CheckpointError):
                if opened(tmp_path, config | {key: value}) == before:
                    overlooked.add(path)
    expected = IGNORED.get(family, set())
    keys = {path: path.removeprefix("text_config.").partition(".")[0] for path in overlooked}
    assert {path for path, key in keys.items() if key not in HARMLESS} == expected


def without(config: Mapping[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    """Yields the config with each attribute absent, and null. Keys of mappings are dotted."""
    for key, value in config.items():
        others = {name: inner for name, inner in config.items() if name != key}
        yield key, others
        yield f"{key} null", others | {key: None}
        if isinstance(value, dict) and key not in OTHER_PARTS:
            yield from ((f"{key}.{path}", others | {key: inner}) for path, inner in without(value))


OTHER_SIZES = {  # transformers' default is one model's size, ours follows from other sizes; tensors' shapes are checked
    **dict.fromkeys((*ENCODERS, "gpt_neox"), frozenset({"intermediate_size"})),
    "opt": frozenset({"ffn_dim"}),
    **dict.fromkeys(
        ("deepseek_v3", "deepseek_v32", "gemma", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3"),
        frozenset({"num_key_value_heads"}),
    ),
    # published files lack the attribute and have a head, which transformers then does not tie
    "mistral3": frozenset({"text_config.num_key_value_heads", "tie_word_embeddings"}),
}


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_absent_and_null_attributes_mean_the_same_as_in_transformers(family: str, tmp_path) -> None:
    """For files that both accept. transformers writes every default explicitly."""
    config = tiny_config(family, **VARIANTS[family])
    others = dict(without(config.to_dict()))
    compared = {}
    for path, other in others.items():
        with suppress(CheckpointError, *REFUSED_BY_TRANSFORMERS):
            got, complete = opened(tmp_path, other), type(config).from_dict(copy.deepcopy(other)).to_dict()
            compared[path] = got == expected_model(tmp_path, complete)
    assert len(compared) > len(others) / 3
    assert {path for path, is_same in compared.items() if not is_same} == OTHER_SIZES.get(family, frozenset())
