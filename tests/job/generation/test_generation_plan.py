"""Plans for generation with the bundled model."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from pipeline.cluster.devices import Topology
from pipeline.cluster.sharding import make_mesh
from pipeline.config.choices import ComputeDtype, Int8OrSame, Packing, Weights, WeightsDtype, When, Windows
from pipeline.config.composing import PACKAGE
from pipeline.config.schema import BatchConfig, CaptureConfig, GenerateData, ModelConfig, RunConfig
from pipeline.core.errors import ConfigError
from pipeline.core.sites import ActivationKey, Site
from pipeline.job.generation.decode import Decoding
from pipeline.models.attention.xla import attend_xla
from pipeline.models.checkpoints.loading import abstract_params
from pipeline.models.partition import Partition
from pipeline.models.registry import Model, open_model
from pipeline.planning.generation_plan import GenerationPlan, GenerationSpec, Sampling, cache_bytes, plan_generation
from pipeline.planning.slice.chips import CHIPS
from scripts.bench.published_shapes import SHAPES

KEY = ActivationKey(1, Site.resid_post)
MODEL = open_model(str(PACKAGE / "assets" / "tiny-qwen2"))
CONFIG = RunConfig(
    model=ModelConfig(dtype=ComputeDtype.bfloat16),
    data=GenerateData(source="generate", rows=16, prompt_length=100, max_new_tokens=28),
    batch=BatchConfig(length=128),
)


def plan(config: RunConfig, model: Model, **given: object) -> GenerationPlan:
    return plan_generation(config, model, **{"activations": {}, "tensor": 1, "topology": Topology(devices=1)} | given)


def test_the_memory_of_each_device_is_counted():
    planned = plan(CONFIG, MODEL, tensor=2, topology=Topology(devices=8))
    layers, kv_heads, head_dim, vocabulary = 6, 2, 32, 2048
    assert planned.cache_bytes == 2 * layers * kv_heads * head_dim * 2 * 16 * 128 // 8
    assert planned.logits_bytes == 4 * vocabulary * 16 // 4
    assert planned.weights.sharding is Weights.tensor
    assert planned.notes == ()
    whole = plan(CONFIG, MODEL)
    assert whole.weights.device_bytes == MODEL.generation.weight_bytes("bfloat16").on_device()
    assert whole.cache_bytes == 8 * planned.cache_bytes
    assert f"{whole.cache_bytes / 2**20:.1f} MiB of keys and values" in whole.describe()
    beams = replace(CONFIG, data=replace(CONFIG.data, beams=4))
    assert plan(beams, MODEL).cache_bytes == 2 * whole.cache_bytes  # XLA's temporary memory of a step is one of them


@pytest.mark.parametrize("changes", [{"packing": Packing.concat}, {"windows": Windows.restart}])
def test_rows_that_add_tokens_are_refused(changes: dict):
    name, value = next(iter(changes.items()))
    with pytest.raises(ConfigError, match=f"batch.{name}={value} with data=generate.*Set batch.packing=pack"):
        plan(replace(CONFIG, batch=replace(CONFIG.batch, **changes)), MODEL)


@pytest.mark.parametrize("is_int8", [False, True])
def test_the_cache_of_deltanets_does_not_grow_with_the_length(is_int8: bool, tmp_path):
    """Three layers with a DeltaNet and one with attention. The plan counts the arrays that generation makes."""
    shape = {"model_type": "qwen3_5_text", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    shape |= {"num_hidden_layers": 4, "vocab_size": 101, "num_key_value_heads": 2, "head_dim": 8}
    shape |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    shape |= {"linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    model = open_model(str(tmp_path), init="random")
    data = replace(CONFIG.data, cache_dtype=Int8OrSame.int8 if is_int8 else Int8OrSame.same)
    planned = plan(replace(CONFIG, data=data), model)
    with pytest.raises(ConfigError, match=r"data\.speculate = 2, but the model has recurrent layers"):
        plan(replace(CONFIG, data=replace(data, speculate=2)), model)
    of_head = 8 + 4 if is_int8 else 8 * 2
    attention, delta = 2 * 2 * of_head * 128, 3 * (2 * 2 * 16 + 4 * 24) * 2 + 4 * 16 * 24 * 4
    assert planned.cache_bytes == 16 * (attention + 3 * delta) == made_cache_bytes(model, planned.spec)


OTHER_CACHES = {  # a convolution of 32 channels; Mamba 2 with 2 groups of 2 heads
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 4, "n_groups": 2},
}


@pytest.mark.parametrize("family", OTHER_CACHES)
def test_the_plan_counts_the_caches_that_generation_makes(family: str, tmp_path):
    shape = {"model_type": family, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    shape |= {"vocab_size": 101, "num_key_value_heads": 2, "head_dim": 8} | OTHER_CACHES[family]
    (tmp_path / "config.json").write_text(json.dumps(shape))
    model = open_model(str(tmp_path), init="random")
    planned = plan(CONFIG, model)
    assert planned.cache_bytes == made_cache_bytes(model, planned.spec)


@pytest.mark.parametrize(
    ("shape", "options", "token_bytes"),
    [
        ("DeepSeek-V2-Lite", {}, 6 * (512 + 64) * 2),  # 61,440 with the keys and values of all heads
        ("gemma-3-1b", {"speculate": 3, "cache_is_int8": True}, (8192 + 5 * 544) * 2 * (256 + 4) / 8192),
    ],
)
def test_latents_and_windows_need_few_bytes_per_token(shape, options, token_bytes, tmp_path):
    """Of six layers at 8192 tokens. The plan counts the arrays that generation makes. Each device has all latents."""
    published = json.loads((Path(__file__).parents[2] / "models" / "published_configs.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(published[shape] | {"num_hidden_layers": 6}))
    model = open_model(str(tmp_path), init="random")
    spec = GenerationSpec(2, 4096, 4096, (), Sampling(), **options)
    planned = cache_bytes(model.arch, spec, itemsize=2)
    assert planned == 2 * 8192 * token_bytes == made_cache_bytes(model, spec)
    assert cache_bytes(model.arch, spec, itemsize=2, tensor=2) == (planned if model.arch.latent else planned // 2)


def made_cache_bytes(model: Model, spec: GenerationSpec) -> int:
    decoding = Decoding(model, Partition(make_mesh(devices=jax.devices()[:1])), attend_xla, spec)
    params = abstract_params(model.generation.leaves(), "bfloat16", decoding.partition.leaf_sharding)
    new = jax.eval_shape(decoding.start, params, decoding.new_row_shapes())
    caches = jax.tree.leaves(decoding.state_shapes(new).caches)
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in caches)


def planned_on_v5e(tmp_path, shape: str, **model) -> GenerationPlan:
    """The plan for 64 chips, four per process."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[shape]))
    config = replace(
        CONFIG,
        model=ModelConfig(dtype=ComputeDtype.bfloat16, **model),
        data=GenerateData(source="generate", rows=256, prompt_length=1024, max_new_tokens=1024),
        batch=BatchConfig(length=2048),
    )
    topology = Topology(devices=64, processes=16, device_bytes=CHIPS["v5e"].hbm_bytes)
    return plan_generation(
        config, open_model(str(tmp_path), init="random"), activations={}, tensor=1, topology=topology
    )


@pytest.mark.parametrize(
    ("shape", "model", "tensor", "weights"),
    [
        ("Qwen2.5-0.5B", {}, 1, "replicated"),
        ("Qwen2.5-7B", {}, 4, "tensor"),
        ("Qwen2.5-7B", {"weights_dtype": WeightsDtype.int8}, 1, "replicated"),
        ("Llama-3-70B", {}, 4, "fsdp"),
        ("Qwen2.5-7B", {"weights": Weights.fsdp}, 1, "fsdp"),
    ],
)
def test_generation_prefers_dividing_weights_along_tensor_to_gathering_them(tmp_path, shape, model, tensor, weights):
    planned = planned_on_v5e(tmp_path, shape, **model).weights
    assert (planned.tensor, str(planned.sharding)) == (tensor, weights)


def test_rows_shorter_than_the_longest_document_are_noted():
    config = replace(CONFIG, batch=BatchConfig(length=64))
    (note,) = plan(config, MODEL).notes
    assert "up to 128 tokens: if longer than batch.length=64, it is split into windows" in note


def test_a_plan_that_exceeds_device_memory_is_refused():
    topology = Topology(devices=1, device_bytes=4 << 20)
    with pytest.raises(
        ConfigError, match="needs 3 MiB for weights, 3 MiB for keys .* 0 MiB for logits .*. Lower data.rows"
    ):
        plan(CONFIG, MODEL, topology=topology)


def test_kept_activations_take_memory():
    config = replace(CONFIG, capture=CaptureConfig(when=When.decode))
    planned = plan(config, MODEL, activations={KEY: 256}, tensor=2, topology=Topology(devices=8))
    assert planned.kept_bytes == 256 * 2 * 16 * 128 // 4
    assert f"{planned.kept_bytes / 2**20:.1f} MiB of activations" in planned.describe()
    with pytest.raises(
        ConfigError, match=r"data.group = 64 documents have up to 1600 MiB .* Lower data.group to at most 40"
    ):
        plan(config, MODEL, activations={KEY: 100 << 10})
