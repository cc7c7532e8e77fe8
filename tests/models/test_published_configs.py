"""config.json of well-known models, as published: accepted, with the right number of parameters."""

import json
from pathlib import Path

import pytest

from pipeline.core.sites import ActivationKey, Site
from pipeline.models.leaves import num_params
from pipeline.models.registry import open_model
from scripts.bench.published_shapes import SHAPES

PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text())
CONFIGS = PUBLISHED | {f"{name}'s shape": config for name, config in SHAPES.items()}  # of the benchmarks
NUM_PARAMS = {  # transformers' count: with the unembedding where it is not tied, and without BERT's heads
    "gpt2": 124_439_808,
    "bert-base-uncased": 108_891_648,
    "xlm-roberta-base": 277_453_056,
    "pythia-70m": 70_426_624,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "OLMo-2-7B": 7_298_617_344,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Qwen3-0.6B": 596_049_920,
    "gpt-oss-20b": 20_914_757_184,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "DeepSeek-V3": 671_026_419_200,
    "phi-4": 14_659_507_200,
    "SmolLM3-3B": 3_075_098_624,
    "Olmo-3-7B": 7_298_011_136,
    "TinyStories-33M": 68_514_048,
    "gpt-j-6b": 6_050_882_784,
    "opt-125m": 125_239_296,
    "phi-2": 2_779_683_840,
    "granite-3.1-1b-a400m": 1_334_628_352,
    "command-r7b": 8_028_033_024,
    "OLMo-1B": 1_176_764_416,
    "stablelm-2-1_6b": 1_644_515_328,
    "GLM-4.5-Air": 106_852_251_264,
    "MiniMax-M2": 228_689_764_864,
    "Kimi-K2": 1_026_408_232_448,
    "Kimi-K2.5": 1_026_408_232_448,  # this and the following without vision
    "Llama-4-Scout": 107_769_861_120,
    "Qwen2.5-VL-7B saved by transformers 4.54": 7_615_616_512,
    "Qwen2.5-0.5B's shape": 630_167_424,
    "Qwen2.5-7B's shape": 7_615_616_512,
    "Llama-3-8B's shape": 8_030_261_248,
    "Llama-3-70B's shape": 70_553_706_496,
    "Gemma-2-2B's shape": 2_614_341_888,
    "Gemma-2-9B's shape": 9_241_705_984,
    "Qwen3-30B-A3B's shape": 30_532_122_624,
    "gpt-oss-20b's shape": 20_914_757_184,
    "Mixtral-8x7B's shape": 46_702_792_704,
}


@pytest.mark.parametrize("name", NUM_PARAMS)
def test_every_parameter_is_in_the_key_table(name: str, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    model = open_model(str(tmp_path), init="random")
    keys = [ActivationKey(model.num_layers - 1, Site.resid_post)]
    if Site.final_norm in model.sites:
        keys.append(ActivationKey(-1, Site.final_norm))
    assert num_params(model.leaves(keys, with_head=model.head is not None)) == NUM_PARAMS[name]


def test_windows_are_read_as_published(tmp_path) -> None:
    patterns = {}
    for name, config in PUBLISHED.items():
        (tmp_path / "config.json").write_text(json.dumps(config))
        local = open_model(str(tmp_path), init="random").arch.local
        if local is not None:
            patterns[name] = (local.pattern, local.window)
    assert patterns == {
        "gpt-oss-20b": ("LG" * 12, 128),
        "gemma-2-2b": ("LG" * 13, 4096),
        "gemma-3-1b": ("LLLLLG" * 4 + "LL", 512),
        "gemma-3-4b": ("LLLLLG" * 5 + "LLLL", 1024),
        "Mistral-7B-v0.1": ("L" * 32, 4096),
        "Olmo-3-7B": ("LLLG" * 8, 4096),
        "TinyStories-33M": ("GLGL", 256),
        "Llama-4-Scout": ("LLLG" * 12, 8192),
        "command-r7b": ("LLLG" * 8, 4096),
    }
