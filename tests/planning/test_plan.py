"""The plan is arithmetic: these tests need no device and no weights."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from pipeline.cluster.devices import Topology, unreserved
from pipeline.config.choices import Compression, Packing, Positions, StorageDtype, Weights, When
from pipeline.config.schema import (
    BatchConfig,
    CaptureConfig,
    GenerateData,
    MeshConfig,
    ModelConfig,
    ParquetData,
    RunConfig,
    RunOptions,
    StoreConfig,
)
from pipeline.core.errors import ConfigError
from pipeline.core.messages import counted
from pipeline.job.writing.block_writer import BlockBuffers
from pipeline.models.registry import Model, open_model
from pipeline.models.runs import layer_runs
from pipeline.planning.host_memory import MAX_STEPS_IN_FLIGHT, MAX_STEPS_PER_BLOCK
from pipeline.planning.plan import StoredGeometry, make_plan
from pipeline.step.compiler import DeviceMemory
from pipeline.store.format.layout import MIB
from scripts.bench.published_shapes import SHAPES

ENCODERS = {
    "BERT": {
        **{"model_type": "bert", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
        **{"num_attention_heads": 12, "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2},
        **{"layer_norm_eps": 1e-12, "hidden_act": "gelu"},
    }
}
GIB = 1 << 30
SMALL = "Qwen2.5-0.5B"  # 24 layers of width 896


@cache
def published(name: str) -> Model:
    """A published model, whose weights need not be there."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps((SHAPES | ENCODERS)[name]))
        return open_model(folder, init="random")


BASE = RunConfig(
    data=ParquetData(source="parquet"),
    batch=BatchConfig(rows=8, length=256),
    capture=CaptureConfig(layers=[12], sites=["resid_post"]),
    store=StoreConfig(path="/nowhere"),
)
ONE_DEVICE = Topology(devices=1)


def planned(config=BASE, shards=8, topology=ONE_DEVICE, stored=None, model=SMALL):
    return make_plan(config, published(model), shards, topology, stored)


def test_a_plan_counts_the_bytes_of_steps_blocks_and_host_memory():
    plan = planned()
    row_bytes = 256 * 896 * 2
    assert plan.memory.step_bytes == 8 * row_bytes
    assert plan.rows_per_block % 8 == 0
    assert plan.memory.block_bytes == plan.rows_per_block * row_bytes <= 16 * MIB
    row_statistics_bytes = (2 * 896 + 256) * 4  # mean and squared deviations of each feature, norms of the tokens
    statistics_bytes = (4 * 8 + 2 * plan.rows_per_block) * row_statistics_bytes
    assert plan.memory.host_bytes == 4 * plan.memory.step_bytes + 2 * plan.memory.block_bytes + statistics_bytes
    for store in (StoreConfig(path="gs://nowhere/store"), StoreConfig(path="/nowhere", compression=Compression.zstd)):
        encoding = planned(replace(BASE, store=store))  # TensorStore has encoded copies
        assert encoding.memory.host_bytes == 4 * plan.memory.step_bytes + 4 * plan.memory.block_bytes + statistics_bytes
    assert [key.name for key in plan.step.keys] == ["blocks.12.resid_post"]


@pytest.mark.parametrize("dtype", [StorageDtype.bfloat16, StorageDtype.int8])
@pytest.mark.parametrize("statistics", [True, False])
def test_host_bytes_include_the_buffers_of_statistics(dtype, statistics):
    """With few selected tokens per row, the statistics are larger than the activations."""
    capture = CaptureConfig(layers=[1, 2], positions=Positions.last, per_row=1, dtype=dtype, statistics=statistics)
    plan = planned(replace(BASE, capture=capture))
    assert plan.mesh.process_rows == 8
    buffers = sum(buffer.nbytes for buffer in BlockBuffers.allocate(plan).leaves())
    assert buffers == plan.memory.block_bytes + plan.rows_per_block * plan.step.row_statistics_bytes
    assert (buffers > 4 * plan.memory.block_bytes) == statistics
    assert plan.memory.host_bytes > 2 * buffers


@pytest.mark.parametrize(("shard_mib", "rows_per_block"), [(0.001, 8), (1000.0, 8 * MAX_STEPS_PER_BLOCK), (4.0, 8)])
def test_a_block_has_whole_steps_within_bounds(shard_mib, rows_per_block):
    assert (
        planned(replace(BASE, store=StoreConfig(path="/nowhere", shard_mib=shard_mib))).rows_per_block == rows_per_block
    )


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [
        (None, "all tokens of the data; a million tokens need 1.81 GB"),
        (5_000_000, "5,000,000 tokens, 9.06 GB"),
        (500_000, "500,000 tokens (up to 516,382: streams end with whole blocks of 8,192 slots), 906.00 MB"),
        (1, "1 token (up to 2,048: streams end with whole blocks of 2,048 slots), 1.81 kB"),
    ],
)
def test_a_plan_gives_the_size_of_the_store(max_tokens, expected):
    """A token has 896 activations of two bytes, and 20 bytes in the side arrays."""
    plan = planned(replace(BASE, run=RunOptions(max_tokens=max_tokens)))
    assert f"\nstore     {expected}" in plan.describe()
    assert "in 1 store shard\n" in plan.describe()


@pytest.mark.parametrize(
    ("max_tokens", "streams", "given", "stored", "rows_per_block"),
    [
        (None, 1, None, None, 32),  # store.shard_mib
        (8 * 32 * 256, 1, None, None, 32),
        (8 * 32 * 256 - 1, 1, None, None, 16),
        (8 * 32 * 256, 2, None, None, 16),
        (1, 1, None, None, 8),  # a step
        *((1, 1, 64, None, 64), (1, 1, None, 128, 128), (1, 1, 24, 24, 24)),
    ],
)
def test_a_new_store_has_eight_blocks_per_stream_or_more(max_tokens, streams, given, stored, rows_per_block):
    config = replace(
        BASE,
        data=ParquetData(num_streams=streams),
        store=StoreConfig(path="/nowhere", rows_per_block=given),
        run=RunOptions(max_tokens=max_tokens),
    )
    assert planned(config, stored=StoredGeometry(streams, stored)).rows_per_block == rows_per_block


def test_a_pod_has_no_larger_store_shards_than_one_process():
    """A block belongs to one process: of 1024 rows of 448 KiB per step, each of 16 processes has 64."""
    config = replace(BASE, batch=BatchConfig(rows=1024, length=256), run=RunOptions(max_inflight_mib=1e6))
    assert planned(config).rows_per_block == 1024
    assert planned(config, 64, Topology(devices=64, processes=16)).rows_per_block == 64


@pytest.mark.parametrize(
    ("rows", "length", "shard_mib", "stored", "shard_bytes", "shards"),
    [
        (8, 256, 16.0, None, None, 1),
        (1, 32768, 16.0, None, None, 1),  # 56 MiB
        (8, 32768, 16.0, None, 256 * MIB, 2),  # 448 MiB
        (8, 32768, 512.0, None, None, 1),
        (16, 32768, 512.0, None, 512 * MIB, 2),
        (8, 32768, 16.0, StoredGeometry(1, 8), None, 1),  # a store that was made with undivided blocks
        (8, 32768, 512.0, StoredGeometry(1, 8, 128 * MIB), 128 * MIB, 4),
    ],
)
def test_large_blocks_are_divided_into_shards(rows, length, shard_mib, stored, shard_bytes, shards):
    batch, run = BatchConfig(rows=rows, length=length), RunOptions(max_inflight_mib=1e5)
    plan = planned(replace(BASE, batch=batch, run=run, store=StoreConfig("/nowhere", shard_mib)), stored=stored)
    assert plan.shard_bytes == shard_bytes
    assert f" in {counted(shards, 'store shard')}\n" in plan.describe()


@pytest.mark.parametrize(
    ("given", "stored", "message"),
    [
        (24, 16, "is 24, but the store has 16 rows per block"),
        (20, None, "does not divide the 20 rows per block.* or set store.rows_per_block to 24"),
        (None, 20, "is 8 per process, which does not divide the 20 rows.*divide 20, or set another store.path"),
    ],
)
def test_rows_per_block_must_fit_steps_and_store(given, stored, message):
    config = replace(BASE, store=StoreConfig(path="/nowhere", rows_per_block=given))
    with pytest.raises(ConfigError, match=message):
        planned(config, stored=StoredGeometry(1, stored))


def test_all_layers_and_embed_are_captured_in_order():
    plan = planned(replace(BASE, capture=CaptureConfig(layers="all", sites=["resid_pre", "embed", "embed"])))
    assert len(plan.step.keys) == 25
    assert plan.step.keys[0].name == "embed"


def test_streams_are_divided_among_all_processes_of_all_readers():
    config = replace(BASE, data=replace(BASE.data, num_streams=11))
    seen = []
    for rank in range(2):
        for process in range(2):
            plan = planned(config, 11, Topology(devices=4, processes=2, process=process, world=2, rank=rank))
            assert plan.mesh.process_rows == 4
            seen += plan.streams.local
    assert sorted(seen) == list(range(11))


def test_steps_in_flight_are_limited_by_bytes_and_in_number():
    step_mib = 8 * 256 * 896 * 2 / MIB
    for mib, steps in [(10_000, MAX_STEPS_IN_FLIGHT), (2.5 * step_mib, 2), (1.5 * step_mib, 1)]:
        plan = planned(replace(BASE, run=RunOptions(max_inflight_mib=mib)))
        assert plan.memory.inflight_steps == steps
        assert any("nothing overlaps" in note for note in plan.notes) == (steps == 1)


def test_a_host_with_few_cores_has_one_step_in_flight():
    few = Topology(devices=1, few_cores=True)
    plan = planned(topology=few)
    many = planned(topology=replace(few, few_cores=False))
    assert (plan.memory.inflight_steps, plan.notes) == (1, many.notes)  # and no note about it
    assert many.memory.inflight_steps > 1
    with pytest.raises(ConfigError, match=r"Set it to at least 4, or"):  # a step has 3.5 MiB
        planned(replace(BASE, run=RunOptions(max_inflight_mib=3)), topology=few)
    with pytest.raises(ConfigError, match=r"Set it to at least 7, or"):
        planned(replace(BASE, run=RunOptions(max_inflight_mib=3)))


def test_a_job_that_exceeds_the_hosts_memory_is_refused():
    config = replace(BASE, store=StoreConfig(path="/nowhere", shard_mib=1e6), run=RunOptions(max_inflight_mib=1e6))
    needed = planned(config).memory.host_bytes
    assert planned(config, topology=Topology(devices=1, host_memory=needed)).memory.host_bytes == needed
    fewer = planned(config, topology=Topology(devices=1, host_memory=needed - 1))
    assert fewer.memory.inflight_steps == 3
    assert f"4 steps in flight would take {needed / MIB:.0f} MiB on this host" in fewer.notes[-1]
    least = needed - 3 * (fewer.memory.step_bytes + fewer.memory.step_statistics_bytes)
    assert planned(config, topology=Topology(devices=1, host_memory=least)).memory.inflight_steps == 1
    with pytest.raises(
        ConfigError, match=r"on this host, which has .* MiB: a step of .* Lower store.shard_mib, or low"
    ):
        planned(config, topology=Topology(devices=1, host_memory=least - 1))


REMEDIES = {  # rows, devices, processes, mesh.context, weights -> what a job that does not fit is told
    "one row per device": (
        4,
        4,
        1,
        1,
        "fsdp",
        "Set mesh.context=2 and batch.rows=2, so that 2 devices divide each row",
    ),
    "divided rows": (2, 8, 1, 4, "fsdp", "Set mesh.context=8 and batch.rows=1, so that 8 devices divide each row"),
    "devices of two hosts": (4, 8, 2, 2, "fsdp", "Set mesh.context=4 and batch.rows=2, so that 4 devices divide each"),
    "all devices of a host": (2, 8, 2, 4, "fsdp", "Lower batch.length, or use larger devices."),
    "whole weights": (1, 4, 1, 4, "replicated", "Lower batch.length, divide the weights (model.weights=fsdp), or"),
}


@pytest.mark.parametrize("case", REMEDIES)
def test_a_job_that_does_not_fit_is_told_what_it_can_change(case):
    rows, devices, processes, context, weights, remedy = REMEDIES[case]
    config = replace(
        BASE,
        batch=BatchConfig(rows=rows, length=256),
        mesh=MeshConfig(context=context),
        model=ModelConfig(weights=Weights(weights)),
    )
    plan = planned(config, topology=Topology(devices=devices, processes=processes))
    with pytest.raises(ConfigError) as refused:
        plan.fitted(DeviceMemory(GIB // 4, GIB // 8, 0, GIB), GIB // 2)
    assert f"which has 0.50 GiB. {remedy}" in str(refused.value)
    if (wider := plan.wider_context) is not None:  # it works
        told = replace(config, mesh=MeshConfig(context=wider), batch=BatchConfig(rows=devices // wider, length=256))
        assert planned(told, topology=Topology(devices=devices, processes=processes)).mesh.context == wider


@pytest.mark.parametrize(
    ("path", "host_gib", "buffers"),
    [
        ("/nowhere", 1000, 2),
        ("gs://bucket/store", None, 2),
        ("s3://bucket/store", 1000, 33),  # 32 requests, one per block, and a block that is being filled
        ("gs://bucket/store", 4, 9),  # 256 MiB for buffers of twice 14 MiB
        ("gs://bucket/store", 0.5, 2),
    ],
)
def test_enough_buffers_keep_the_requests_to_object_storage_busy(path, host_gib, buffers):
    store = StoreConfig(path=path, shard_mib=14)
    host_memory = None if host_gib is None else int(host_gib * (1 << 30))
    memory = planned(replace(BASE, store=store), topology=Topology(devices=1, host_memory=host_memory)).memory
    assert (memory.block_bytes, memory.host_buffers) == (14 << 20, buffers)
    assert memory.encoded_blocks == (0 if path == "/nowhere" else buffers)


def test_outputs_count_the_head_and_their_bytes():
    last = CaptureConfig(layers=[23])
    before = planned(replace(BASE, capture=last))
    plan = planned(replace(BASE, capture=replace(last, outputs=["top_logprobs", "loss"], top_logprobs=5)))
    assert [(spec.name, spec.dtype, spec.width) for spec in plan.step.stored_arrays.outputs] == [
        ("loss", "float32", None),
        ("top_logprobs", "float32", 5),
        ("top_ids", "int32", 5),
    ]
    assert plan.step.keys == before.step.keys
    assert [key.name for key in plan.step.forward_keys] == ["blocks.23.resid_post", "final_norm"]
    assert plan.weights.device_bytes == before.weights.device_bytes + 2 * (151936 + 1) * 896  # with the last norm
    assert plan.step.row_bytes == before.step.row_bytes + 256 * 4 * (1 + 5 + 5)
    buffers = sum(buffer.nbytes for buffer in BlockBuffers.allocate(plan).leaves())
    assert buffers == plan.memory.block_bytes + plan.rows_per_block * plan.step.row_statistics_bytes
    assert "blocks.23.resid_post, loss, top_logprobs, top_ids: 1,836 bytes per token" in plan.describe()


def test_an_encoder_has_no_outputs():
    config = replace(BASE, capture=CaptureConfig(layers=[1], outputs=["loss"]))
    with pytest.raises(ConfigError, match=r"capture.outputs is \['loss'\], but the model is an encoder \(bert\)"):
        planned(config, model="BERT")


REFUSED = {
    "unknown output": (
        dict(capture=CaptureConfig(layers=[1], outputs=["losses"])),
        r"capture.outputs contains \['losses'\]. Set it to a subset of \[loss,entropy,top_logprobs\]",
    ),
    "more top tokens than the vocabulary has": (
        dict(capture=CaptureConfig(layers=[1], outputs=["top_logprobs"], top_logprobs=200_000)),
        "capture.top_logprobs is 200000, but the model's vocabulary has 151936",
    ),
    "outputs with capture.when=decode": (
        dict(capture=CaptureConfig(layers=[1], outputs=["loss"], when=When.decode)),
        "capture.outputs is .* with capture.when=decode",
    ),
    "layer out of range": (dict(capture=CaptureConfig(layers=[24])), "capture.layers contains 24.*layers 0..23"),
    "a word for layers": (dict(capture=CaptureConfig(layers="most")), "capture.layers is 'most'"),
    "attention entropies with capture.when=decode": (
        dict(capture=CaptureConfig(layers=[1], sites=["attn_entropy"], when=When.decode)),
        "capture.sites contains attn_entropy with capture.when=decode, which keeps only",
    ),
    "attention patterns of all tokens": (
        dict(capture=CaptureConfig(layers=[1], sites=["attn_pattern"])),
        "capture.sites contains attn_pattern with capture.positions=all.*capture.positions",
    ),
    "chunks of different sizes": (dict(mesh=MeshConfig(context=3)), "batch.length is 256, but .* of 6, at least 48"),
    "attention patterns with divided positions": (
        dict(mesh=MeshConfig(context=2), capture=CaptureConfig([1], ["attn_pattern"], positions=Positions.last)),
        "mesh.context is 2 and capture.sites contains attn_pattern",
    ),
    "generating with divided positions": (
        dict(mesh=MeshConfig(context=2), data=GenerateData()),
        "mesh.context is 2 with data=generate",
    ),
    "unknown site": (dict(capture=CaptureConfig(layers=[1], sites=["resid_past"])), "resid_past.*resid_post"),
    "overlap": (dict(batch=BatchConfig(length=64, overlap=64)), r"batch.overlap is 64. Set it to 0..63"),
    "overlap while decoding": (
        dict(batch=BatchConfig(overlap=1), capture=CaptureConfig(layers=[1], when=When.decode)),
        "batch.overlap=1 with capture.when=decode",
    ),
    "overlap of joined rows": (
        dict(batch=BatchConfig(overlap=1, packing=Packing.concat)),
        "batch.overlap=1 with batch.packing=concat",
    ),
    "row longer than the model's positions": (dict(batch=BatchConfig(length=40_000)), "batch.length is 40000"),
    "less memory in flight than a step": (dict(run=RunOptions(max_inflight_mib=0.5)), "run.max_inflight_mib"),
    "more streams than source shards": (dict(data=ParquetData(num_streams=9)), "data.num_streams is 9.*8 source"),
    "weights along no tensor axis": (
        dict(model=ModelConfig(weights=Weights.tensor)),
        "model.weights=tensor does not match mesh.tensor=1",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_invalid_settings_are_refused_with_a_remedy(changes, message):
    with pytest.raises(ConfigError, match=message) as refused:
        planned(replace(BASE, **changes))
    assert any(word in str(refused.value) for word in ("Set ", "expected"))


@pytest.mark.parametrize("weights", [Weights.replicated, Weights.fsdp])
def test_on_gpus_each_layer_is_a_run_unless_fsdp_divides_it(weights):
    config = replace(BASE, model=ModelConfig(weights=weights))
    usual, single = (planned(config, topology=Topology(devices=4, platform=platform)) for platform in ("tpu", "gpu"))
    runs = [*map(len, layer_runs(single.step.forward_keys, published(SMALL).arch))]
    assert (runs == [1] * 13) is (weights is Weights.replicated)
    assert single.step.keys == usual.step.keys
    assert single.layout == usual.layout
    assert single.weights == replace(usual.weights, on_gpus=True)


def test_a_plan_has_the_notes_of_its_parts():
    config = replace(BASE, run=RunOptions(max_inflight_mib=4), model=ModelConfig(weights=Weights.auto))
    plan = planned(config, 100, Topology(devices=4, device_bytes=1000 * MIB))
    assert (plan.weights.sharding, plan.weights.device_bytes // MIB) == (Weights.fsdp, 157)
    assert plan.notes == (*plan.weights.notes, *plan.streams.notes, *plan.memory.notes)
    assert [bool(part.notes) for part in (plan.weights, plan.streams, plan.memory)] == [True, True, True]
    assert plan.describe_notes().splitlines() == [f"note      {note}" for note in plan.notes]


def test_reserved_device_memory_is_not_used():
    """Memory for a training, for example. Neither the plan nor the plan for a slice uses it."""
    run = RunOptions(reserved_mib=3000)
    left = unreserved(5000 * MIB, run)
    plan = planned(replace(BASE, run=run), topology=Topology(devices=4, device_bytes=left))
    assert (left, plan.reserved_bytes) == (2000 * MIB, 3000 * MIB)
    assert "reserved  3000 MiB on each device, for other uses" in plan.describe()


FITTED = {  # arguments, outputs, temporaries, peak and the device's memory in GiB -> steps in flight of four
    "all": ((4, 1, 2, 6), 10, 4),
    "unknown memory": ((4, 1, 2, 6), None, 4),
    "fewer": ((4, 1, 2, 6), 9.9, 3),
    "one": ((4, 1, 2, 6), 7.5, 1),
    "none": ((4, 1, 2, 6), 5.9, None),
    "none, without a peak": ((4, 1, 2, 0), 6.9, None),
}


@pytest.mark.parametrize(("parts", "device", "steps"), FITTED.values(), ids=FITTED.keys())
def test_as_many_steps_are_in_flight_as_fit_into_a_device(parts, device, steps):
    plan = planned(replace(BASE, run=RunOptions(reserved_mib=512)))
    program = DeviceMemory(*(part * GIB for part in parts))
    device_bytes = device and int(device * GIB)
    need = r"a step needs 7.00 GiB of each device \(arguments 4.00, outputs 1.00, temporaries 2.00; "
    need += r"0.38 for each row\), which has \d\.\d0 GiB besides the 0.50 of run.reserved_mib"
    if steps is None:
        with pytest.raises(ConfigError, match=rf"{need}\. Lower batch.rows"):
            plan.fitted(program, device_bytes)
        return
    fitted = plan.fitted(program, device_bytes)
    assert fitted.memory.inflight_steps == steps
    assert (fitted == plan) == (steps == 4)
    assert steps == 4 or re.fullmatch(rf"{need}: {steps} instead of 4 steps are in flight", fitted.notes[-1])


def test_rows_must_divide_among_the_devices():
    with pytest.raises(ConfigError, match="batch.rows = 8 is not a multiple of the 3 devices"):
        planned(topology=Topology(devices=3))
