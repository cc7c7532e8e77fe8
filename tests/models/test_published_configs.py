"""config.json of well-known models, as published: accepted, with the right number of parameters."""

import json
from pathlib import Path

import pytest

from pipeline.core.sites import ActivationKey, Site
from pipeline.models.leaves import num_params
from pipeline.models.registry import open_model

CONFIGS = json.loads((Path(__file__).parent / "published_configs.json").read_text())
NUM_PARAMS = {  # transformers' count: with the unembedding where it is not tied, and without BERT's heads
    "gpt2": 124_439_808,
    "bert-base-uncased": 108_891_648,
    "pythia-70m": 70_426_624,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
    "OLMo-2-7B": 7_298_617_344,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Qwen3-0.6B": 596_049_920,
    "gpt-oss-20b": 20_914_757_184,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "DeepSeek-V3": 671_026_419_200,
    "phi-4": 14_659_507_200,
    "SmolLM3-3B": 3_075_098_624,
    "Olmo-3-7B": 7_298_011_136,
}
TIED = {"gpt2", "gemma-2-2b", "gemma-3-1b", "Qwen3-0.6B", "SmolLM3-3B"}


@pytest.mark.parametrize("name", NUM_PARAMS)
def test_every_parameter_is_in_the_key_table(name: str, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    model = open_model(str(tmp_path), init="random")
    keys = [ActivationKey(model.num_layers - 1, Site.resid_post)]
    if Site.final_norm in model.sites:
        keys.append(ActivationKey(-1, Site.final_norm))
    has_unembedding = name not in TIED and Site.final_norm in model.sites
    unembedding = model.vocab_size * model.arch.d_model if has_unembedding else 0
    assert num_params(model.leaves(keys)) + unembedding == NUM_PARAMS[name]


def test_windows_are_read_as_published(tmp_path) -> None:
    patterns = {}
    for name, config in CONFIGS.items():
        (tmp_path / "config.json").write_text(json.dumps(config))
        local = open_model(str(tmp_path), init="random").arch.local
        if local is not None:
            patterns[name] = (local.pattern, local.window)
    assert patterns == {
        "gpt-oss-20b": ("LG" * 12, 128),
        "gemma-2-2b": ("LG" * 13, 4096),
        "gemma-3-1b": ("LLLLLG" * 4 + "LL", 512),
        "Mistral-7B-v0.1": ("L" * 32, 4096),
        "Olmo-3-7B": ("LLLG" * 8, 4096),
    }
