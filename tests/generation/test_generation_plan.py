"""What a plan says of generation, for the bundled model."""

from dataclasses import replace

import pytest

from pipeline.cluster.topology import Topology
from pipeline.config.choices import ComputeDtype, Weights, WeightsDtype, When
from pipeline.config.composing import PACKAGE
from pipeline.config.schema import (
    BatchConfig,
    CaptureConfig,
    GenerateData,
    ModelConfig,
    ParquetData,
    RunConfig,
    RunOptions,
)
from pipeline.core.errors import ConfigError
from pipeline.models.registry import open_model
from pipeline.planning.generation_plan import plan_generation

MODEL = open_model(str(PACKAGE / "assets" / "tiny-qwen2"))
CONFIG = RunConfig(
    model=ModelConfig(dtype=ComputeDtype.bfloat16),
    data=GenerateData(source="generate", rows=16, prompt_length=100, max_new_tokens=28),
    batch=BatchConfig(length=128),
)


def test_memory_of_each_device():
    plan = plan_generation(CONFIG, MODEL, width=0, data=4, tensor=2, topology=Topology(devices=8))
    layers, kv_heads, head_dim, vocabulary = 6, 2, 32, 2048
    assert plan.cache_bytes == 2 * layers * kv_heads * head_dim * 2 * 16 * 128 // 8
    assert plan.logits_bytes == 4 * vocabulary * 16 // 4
    assert plan.weights.sharding is Weights.tensor
    assert plan.notes == ()
    whole = plan_generation(CONFIG, MODEL, width=0, data=1, tensor=1, topology=Topology(devices=1))
    assert whole.weights.device_bytes == sum(MODEL.generation.weight_bytes("bfloat16"))
    assert whole.cache_bytes == 8 * plan.cache_bytes
    assert f"{whole.cache_bytes / 2**20:.1f} MiB of keys and values" in whole.describe()


def test_rows_that_are_shorter_than_documents_may_be_are_noted():
    config = replace(CONFIG, batch=BatchConfig(length=64))
    (note,) = plan_generation(config, MODEL, width=0, data=1, tensor=1, topology=Topology(devices=1)).notes
    assert "up to 128 tokens: those longer than batch.length=64 are stored in windows" in note


def test_what_does_not_fit_is_refused():
    topology = Topology(devices=1, device_bytes=4 << 20)
    with pytest.raises(ConfigError, match="weights, keys and values, and logits take 3 . 3 . 0 MiB .* Lower data.rows"):
        plan_generation(CONFIG, MODEL, width=0, data=1, tensor=1, topology=topology)


def test_activations_that_are_kept_take_memory_and_a_model_that_writes():
    config = replace(CONFIG, capture=CaptureConfig(when=When.decode))
    plan = plan_generation(config, MODEL, width=256, data=4, tensor=2, topology=Topology(devices=8))
    assert plan.kept_bytes == 256 * 2 * 16 * 128 // 4
    assert f"{plan.kept_bytes / 2**20:.1f} MiB of activations" in plan.describe()
    with pytest.raises(ConfigError, match="capture.when is decode, which is for data=generate"):
        plan_generation(
            replace(config, data=ParquetData(source="parquet")), MODEL, width=0, data=1, tensor=1, topology=Topology(1)
        )


def test_rounded_weights_are_measured_by_one_worker():
    config = replace(CONFIG, model=ModelConfig(weights_dtype=WeightsDtype.int8), run=RunOptions(worker_count=2))
    with pytest.raises(ConfigError, match="several workers: the rounding's error is measured on the first stream"):
        plan_generation(config, MODEL, width=0, data=1, tensor=1, topology=Topology(devices=1))
