from pipeline.core.sites import ActivationKey, Site
from pipeline.models.leaves import num_params
from pipeline.models.registry import open_model
from scripts.bench.published_shapes import write_shapes

PARAMETERS_IN_BILLIONS = {  # from the models' cards, without untied heads
    "Qwen2.5-0.5B": 0.49,
    "Qwen2.5-7B": 7.07,
    "Llama-3-8B": 7.50,
    "Llama-3-70B": 69.5,
    "Gemma-2-2B": 2.61,
    "Gemma-2-9B": 9.24,
    "Qwen3-30B-A3B": 30.2,
    "gpt-oss-20b": 20.3,
    "Mixtral-8x7B": 46.6,
}


def test_shapes_match_the_published_models(tmp_path) -> None:
    write_shapes(tmp_path)
    found = {}
    for name in PARAMETERS_IN_BILLIONS:
        model = open_model(str(tmp_path / name), init="random")
        found[name] = num_params(model.leaves([ActivationKey(-1, Site.final_norm)])) / 1e9
    assert {name: round(found[name], 2 if found[name] < 10 else 1) for name in found} == PARAMETERS_IN_BILLIONS
