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
from test_parity import ALTERNATING, FAMILIES, LONG_ROPE, MSCALE_ROPE, WINDOW, YARN_ROPE, YARN_ROPES

from pipeline.core.errors import CheckpointError
from pipeline.models.families.hf_config import _HARMLESS
from pipeline.models.registry import open_model
from tests.models.hf_reference import CLASSES, tiny_config

pytestmark = pytest.mark.heavy
VARIANTS = FAMILIES | {  # as many attributes as can have a meaning at once
    "deepseek_v2": FAMILIES["deepseek_v2"] | {"rope_parameters": MSCALE_ROPE},
    "gemma3_text": FAMILIES["gemma3_text"] | {"rope_parameters": YARN_ROPES},
    "gpt_oss": FAMILIES["gpt_oss"] | {"attention_bias": False},
    "llama": {"rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "olmo3": {"sliding_window": 7, "layer_types": ALTERNATING, "rope_parameters": YARN_ROPES},
    "phi3": {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 96, "sliding_window": 7},
    "qwen2": WINDOW | {"layer_types": ALTERNATING, "rope_parameters": LONG_ROPE},
    "qwen2_moe": WINDOW,
    "qwen3_moe": WINDOW,
    "qwen3_5_moe_text": {},
    "qwen3": WINDOW | {"layer_types": ALTERNATING},
    "smollm3": WINDOW | {"layer_types": ALTERNATING},
}
ROUTERS_IN_TRAINING = {"output_router_logits", "router_aux_loss_coef"}
REFUSED_BY_TRANSFORMERS = (StrictDataclassError, AttributeError, KeyError, TypeError, ValueError)
IGNORED = {  # not read by transformers' model at inference, or not with the variant's other attributes
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), ROUTERS_IN_TRAINING & {"output_router_logits"}),
    "bert": {"attention_probs_dropout_prob", "hidden_dropout_prob"},
    "gpt2": {"reorder_and_upcast_attn"},
    "gpt_neox": {"is_decoder"},
    "gpt_oss": ROUTERS_IN_TRAINING | {"hidden_act"},
    "mixtral": ROUTERS_IN_TRAINING | {"router_jitter_noise"},
    "olmoe": ROUTERS_IN_TRAINING,
    "phi3": {"rope_parameters.long_factor", "rope_parameters.original_max_position_embeddings"},
    "qwen2": {"max_window_layers", "rope_parameters.long_factor"},
    "qwen2_moe": ROUTERS_IN_TRAINING | {"max_window_layers"},
    "qwen3": {"max_window_layers"},
    **dict.fromkeys(("qwen3_moe", "qwen3_next", "qwen3_5_moe_text"), ROUTERS_IN_TRAINING),
    "smollm3": {"no_rope_layer_interval"},
}


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


@pytest.mark.parametrize("family", CLASSES)
def test_no_attribute_is_overlooked(family: str, tmp_path) -> None:
    config = tiny_config(family, **VARIANTS[family]).to_dict() | {"something_new": None}
    before = opened(tmp_path, config)
    overlooked = set()
    for key in config.keys() - _HARMLESS:
        for path, value in changes(key, config[key]):
            with suppress(CheckpointError):
                if opened(tmp_path, config | {key: value}) == before:
                    overlooked.add(path)
    expected = IGNORED.get(family, set())
    assert {path for path in overlooked if not path.startswith("_") and not path.endswith("_token_id")} == expected


def without(config: Mapping[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    """Yields the config with each attribute absent, and null. Keys of mappings are dotted."""
    for key, value in config.items():
        others = {name: inner for name, inner in config.items() if name != key}
        yield key, others
        yield f"{key} null", others | {key: None}
        if isinstance(value, dict):
            yield from ((f"{key}.{path}", others | {key: inner}) for path, inner in without(value))


OTHER_SIZES = {  # transformers' default is one model's size, ours follows from other sizes; tensors' shapes are checked
    **dict.fromkeys(("bert", "gpt_neox"), frozenset({"intermediate_size"})),
    **dict.fromkeys(
        ("deepseek_v3", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3"), frozenset({"num_key_value_heads"})
    ),
}


@pytest.mark.parametrize("family", CLASSES)
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
