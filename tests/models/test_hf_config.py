"""Configurations that are refused, and unusual ones that are accepted."""

import json
from pathlib import Path

import pytest

from pipeline.core.errors import CheckpointError
from pipeline.models.registry import open_model

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "vocab_size": 199,
}
LLAMA = QWEN2 | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
MISTRAL = QWEN2 | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONG = {"type": "longrope", "short_factor": [1.0, 2.0, 3.0, 4], "long_factor": [8, 8, 8, 8]}
LONG |= {"original_max_position_embeddings": 128}
UNTRUNCATED = {"full_attention": YARN | {"truncate": False}, "sliding_attention": {"rope_type": "default"}}
SLIDING = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}


def open_config(path: Path, config: object):
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return open_model(str(path), init="random")


REFUSED = {
    "unknown attribute": (QWEN2 | {"logit_softcap": 30.0}, "logit_softcap=30.0"),
    "unknown family": (QWEN2 | {"model_type": "mamba"}, "model_type is 'mamba'.*llama, .*mistral.*qwen2, .*qwen3"),
    "no family": ({k: v for k, v in QWEN2.items() if k != "model_type"}, "no 'model_type'"),
    "unknown class": (LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3"),
    "heads that do not divide": (
        QWEN2 | {"num_key_value_heads": 3},
        "a multiple of the 3 key-value heads as heads, got 4",
    ),
    "own code": (QWEN2 | {"model_type": "mine", "auto_map": {"AutoModel": "modeling.Model"}}, "model_type is 'mine'"),
    "too few layer types": (QWEN2 | SLIDING | {"layer_types": ["sliding_attention"]}, "for each of the 4 layers"),
    "longrope of other heads": (
        QWEN2 | {"rope_scaling": LONG | {"short_factor": [1.0]}},
        "4 numbers as short_factor and long_factor",
    ),
    "longrope of strings": (QWEN2 | {"rope_scaling": LONG | {"long_factor": ["1"]}}, "long_factor: 0 is '1'"),
    "longrope of one position": (
        QWEN2 | {"rope_scaling": LONG | {"original_max_position_embeddings": 1}},
        "division by zero while",
    ),
    "unknown rope": (QWEN2 | {"rope_scaling": {"type": "mrope", "factor": 2.0}}, "type is 'mrope'"),
    "yarn without factor": (QWEN2 | {"rope_parameters": {"rope_type": "yarn"}}, "has no 'factor'"),
    "yarn of one wavelength": (QWEN2 | {"rope_theta": 1, "rope_scaling": YARN}, "a rope_theta above 1, got 1"),
    "yarn of a layer kind, not truncated": (
        QWEN2 | {"model_type": "olmo3", "architectures": [], "rope_parameters": UNTRUNCATED},
        "no truncate=false",
    ),
    "no dimension that rotates": (
        QWEN2 | {"model_type": "stablelm", "architectures": [], "partial_rotary_factor": 0.01},
        "an even number of a head's 8 dimensions to rotate, got 0",
    ),
    "llama3 with factors in the wrong order": (
        LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 1}},
        "low_freq_factor of at most high_freq_factor, 1, got 4",
    ),
    "a number that float32 lacks": (LLAMA | {"rms_norm_eps": 1e-40}, "rms_norm_eps is 1e-40"),
    "rope without factor": (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling has no 'factor'"),
    "Galactica with computed positions": (
        {k: v for k, v in LLAMA.items() if k not in ("architectures", "intermediate_size")}
        | {"model_type": "opt", "ffn_dim": 48, "learned_embeddings": False},
        "learned_embeddings is False",
    ),
    "two ropes": (
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        "expected rope_scaling or rope_parameters, got both",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configurations_that_are_not_implemented_are_refused(case: str, tmp_path) -> None:
    config, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message) as refusal:
        open_config(tmp_path, config)
    assert str(tmp_path / "config.json") in str(refusal.value)


ACCEPTED = {
    "as published": QWEN2 | {"torch_dtype": "bfloat16", "use_cache": True, "use_mrope": False, "bos_token_id": 1},
    "null": QWEN2 | {"rope_scaling": None, "sliding_window": None, "something_new": None},
    "yarn": QWEN2 | {"rope_scaling": YARN | {"attention_factor": None, "beta_slow": None}},
    "dynamic": QWEN2 | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "both spellings": LLAMA | {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}},
    "SmolLM2": LLAMA | {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}},
    "heads of the family's size": LLAMA | {"model_type": "seed_oss", "architectures": None, "num_attention_heads": 6},
    "without architectures": {k: v for k, v in LLAMA.items() if k != "architectures"},
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_unusual_configurations_are_accepted(case: str, tmp_path) -> None:
    model = open_config(tmp_path, ACCEPTED[case])
    assert (model.num_layers, model.vocab_size, model.max_positions) == (4, 199, 512)


WINDOWS = {
    "Qwen2's last layers": (QWEN2 | SLIDING, "GGLL", 64),
    "Mistral's default": (MISTRAL | {"max_position_embeddings": 8192}, "LLLL", 4096),
}


def test_generation_is_limited_to_the_positions_of_short_factors(tmp_path) -> None:
    model = open_config(tmp_path, QWEN2 | {"rope_scaling": LONG})
    assert (model.arch.max_generated, model.max_positions) == (128, 512)


NO_WINDOWS = {
    "not used": QWEN2 | SLIDING | {"use_sliding_window": False},
    "beyond the context": QWEN2 | SLIDING | {"sliding_window": 512},
    "no layer": QWEN2 | SLIDING | {"max_window_layers": 4},
    "null": MISTRAL | {"sliding_window": None},
}


@pytest.mark.parametrize("case", WINDOWS)
def test_windows_and_their_layers_are_read(case: str, tmp_path) -> None:
    config, pattern, window = WINDOWS[case]
    local = open_config(tmp_path, config).arch.local
    assert (local.pattern, local.window) == (pattern, window)


@pytest.mark.parametrize("case", NO_WINDOWS)
def test_windows_without_effect_are_dropped(case: str, tmp_path) -> None:
    assert open_config(tmp_path, NO_WINDOWS[case]).arch.local is None


def test_a_folder_without_config_is_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_model(str(tmp_path))


def test_code_next_to_an_implemented_model_is_not_run(tmp_path) -> None:
    """As in transformers without `trust_remote_code`. Phi-3's repositories have such code."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    plain = open_model(str(tmp_path), init="random").arch
    (tmp_path / "config.json").write_text(json.dumps(QWEN2 | {"auto_map": {"AutoModel": "modeling.Model"}}))
    assert open_model(str(tmp_path), init="random").arch == plain
