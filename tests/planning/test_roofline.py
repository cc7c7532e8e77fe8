"""Limits and costs, compared with figures computed by hand."""

import re
from dataclasses import replace

import pytest

from pipeline.config import composing
from pipeline.config.choices import Weights
from pipeline.config.schema import (
    GenerateData,
    HfData,
    ParquetData,
    RunConfig,
    StoreConfig,
)
from pipeline.core.sites import ActivationKey, Site, activation_keys
from pipeline.data.sources import num_named_files
from pipeline.models.architecture import Architecture, Experts, LocalAttention
from pipeline.models.checkpoints.loading import WeightBytes
from pipeline.models.leaves import flops_per_token, make_leaf
from pipeline.models.registry import Model, open_model
from pipeline.planning.slice.advice import advise
from pipeline.planning.slice.chips import CHIPS, parse_slice
from pipeline.planning.slice.compile_check import Program
from pipeline.planning.slice.roofline import (
    Cost,
    Limits,
    bill,
    decoding,
    forward_mfu,
    received_bytes,
    throughput_limits,
    traffic,
)
from pipeline.planning.slice.slice_plan import SlicePlan, make_slice_plan, plan_job
from tests.specs import LLAMA

V5E_64 = parse_slice("v5e-64")
COST = Cost(flops=1_000_000_000, activation_bytes=5380, fill=0.5)  # with the side arrays 5400 bytes a slot


def test_every_limit_follows_from_cost_and_slice() -> None:
    limits = throughput_limits(COST, V5E_64, mfu=0.4, store_bytes_per_s=21.6e9)
    assert limits.compute == pytest.approx(64 * 197e12 * 0.4 / 2e9)  # a valid token costs two slots
    assert limits.device_to_host == pytest.approx(64 * 16e9 / (2 * 5380))
    assert limits.interconnect is None
    assert limits.host_copy == pytest.approx(16 * 205e9 / 6 / (2 * 5380))
    assert limits.network == pytest.approx(64 * 3.125e9 / (2 * 5400))
    assert limits.store == pytest.approx(21.6e9 / 10800)
    assert (limits.binding, limits.tokens_per_s) == ("store", pytest.approx(2e6))


@pytest.mark.parametrize("name", ["compute", "interconnect", "device_to_host", "host_copy", "network", "store"])
def test_the_lowest_limit_binds(name: str) -> None:
    others = {"compute": 2.0, "interconnect": None, "device_to_host": 3.0, "host_copy": 3.0, "network": 4.0}
    limits = Limits(**others | {"store": 5.0} | {name: 1.0})
    assert (limits.binding, limits.tokens_per_s) == (name, 1.0)


def test_interconnect_bytes_follow_the_topology_and_the_division() -> None:
    """At peak, with fsdp on 8x8 v5e chips, computing takes as long as gathering from 1,970 tokens per chip on."""
    assert parse_slice("v5e:8x8").interconnect_bytes_per_s == 2 * 50e9
    assert parse_slice("v5e:16x16").interconnect_bytes_per_s == 4 * 50e9
    assert parse_slice("v5p:4x4x4").interconnect_bytes_per_s == 6 * 100e9
    assert parse_slice("v4:2x2x1").interconnect_bytes_per_s == 2 * 50e9
    weights = WeightBytes({"q": make_leaf(LLAMA, "attention.q", "q")}, "bfloat16")
    assert received_bytes(weights, Weights.fsdp, data=8, tensor=2, summed=600) == 512 * 512 * 7 // 8 + 600
    assert received_bytes(weights, Weights.replicated, data=8, tensor=1, summed=600) == 0
    matrices, tokens = 2 * 10**9, 64 * 1970  # bytes, of 10^9 numbers
    cost = Cost(2 * 10**9, 1.0, fill=1.0, received_bytes=matrices / tokens)
    limits = throughput_limits(cost, V5E_64, mfu=1.0, store_bytes_per_s=1e30)
    assert limits.interconnect == pytest.approx(limits.compute, rel=1e-3)


def test_a_decoding_step_takes_as_long_as_reading_and_gathering_its_bytes() -> None:
    assert decoding(256, 4_095_000_000, 0, V5E_64).step_s == pytest.approx(5e-3)
    gathering = decoding(256, 819_000_000, 1_000_000_000, V5E_64)
    assert (gathering.step_s, gathering.tokens_per_s) == (pytest.approx(10e-3), pytest.approx(25_600))


MIXTRAL, GPT_OSS = (replace(LLAMA, experts=Experts("SS", num, 4, 512, True)) for num in (8, 32))
UTILISED = {  # of 100 FLOPs, 20 in attention
    "dense": ("v5e", LLAMA, 100 / (80 / 0.55 + 20 / 0.13)),  # heads of 64
    "few experts": ("v5p", replace(MIXTRAL, head_dim=128), 100 / (80 / 0.52 + 20 / 0.26)),
    "many experts": ("v6e", replace(GPT_OSS, head_dim=256), 100 / (80 / 0.225 + 20 / 0.21)),
}


@pytest.mark.parametrize(("chip", "arch", "mfu"), UTILISED.values(), ids=UTILISED.keys())
def test_the_utilisation_follows_from_chip_experts_and_attention(chip: str, arch: Architecture, mfu: float) -> None:
    assert forward_mfu(CHIPS[chip], arch, 100, 20) == pytest.approx(mfu)
    assert forward_mfu(CHIPS[chip], arch, 0, 0) > 0


@pytest.mark.parametrize(("window", "keys"), [(None, 4.5), (4, 3.25)])
def test_masked_attention_is_not_counted(window: int | None, keys: float) -> None:
    """In a row of 8 positions: 1 + 2 + ... + 8 keys, or at most 4 each; half of them in the packed rows."""
    local = window and LocalAttention(pattern="L" * LLAMA.num_layers, window=window, rope=None)
    arch, layer = replace(LLAMA, local=local), activation_keys((0,), (Site.resid_post,))
    assert flops_per_token(arch, {}, layer, 8) == 4 * keys * 512
    assert flops_per_token(arch, {}, layer, 8, {window: 0.5}) == 2 * keys * 512
    assert flops_per_token(replace(arch, causal=False, local=None), {}, layer, 8) == 4 * 8 * 512


def test_traffic_and_bill_follow_from_the_rate() -> None:
    flow = traffic(COST, V5E_64, tokens_per_s=1e6)
    assert flow.device_to_host == pytest.approx(10.76e9)
    assert flow.host_memory == pytest.approx(6 * 10.76e9 / 16)
    assert flow.network == pytest.approx(10.8e9 / 16)
    job = bill(COST, V5E_64, num_tokens=3_600_000_000, tokens_per_s=1e6, usd_per_chip_hour=1.2, usd_per_tb_month=20)
    assert (job.hours, job.terabytes) == (pytest.approx(1.0), pytest.approx(38.88))
    assert (job.chips_usd, job.store_usd_per_month) == (pytest.approx(76.8), pytest.approx(777.6))


CONFIG = RunConfig(data=ParquetData(source="parquet"), store=StoreConfig(path="gs://bucket/store"))
COMPUTE_BOUND = Limits(compute=1.0, interconnect=2.0, device_to_host=2.0, host_copy=2.0, network=2.0, store=2.0)
MIB = 1 << 20


def advice(config=CONFIG, limits=COMPUTE_BOUND, shard_bytes=128 * MIB, tokens_per_chip=4096, tpu_slice="v5e-4") -> str:
    return "\n".join(advise(config, LLAMA, parse_slice(tpu_slice), limits, 0.4, shard_bytes, tokens_per_chip))


POOR = {
    "small shards": (dict(shard_bytes=16 * MIB), "16 MiB.*raise store.shard_mib to 64-512"),
    "few tokens": (
        dict(tokens_per_chip=128),
        "128 tokens per chip.*75%.*40% of the peak .plan.mfu.*batch.rows to reach at least about 770 tokens",
    ),
    "fairly few tokens": (dict(tokens_per_chip=512), "512 tokens per chip.*19% of the time to compute"),
    "one file for four hosts": (
        dict(config=replace(CONFIG, data=HfData(data_files="mine.jsonl")), tpu_slice="v5e-16"),
        r"^1 source shard \(.*at most 1 stream, so 3 of 4 hosts have no work; divide the data into at least 4 files, "
        r"or parquet files by data.row_groups_per_shard$",
    ),
    "exchange": (dict(limits=replace(COMPUTE_BOUND, interconnect=0.25)), "4.0 times as long.*raise batch.rows"),
    "bound by the network": (dict(limits=replace(COMPUTE_BOUND, network=0.25)), "network limits.*25%.*fewer layers"),
}


@pytest.mark.parametrize(("choice", "message"), POOR.values(), ids=POOR.keys())
def test_only_poor_choices_get_advice(choice: dict, message: str) -> None:
    assert advice() == ""
    assert re.search(message, advice(**choice))


def test_small_shards_of_few_tokens_or_on_local_disks_get_no_advice() -> None:
    assert advice(shard_bytes=4 * MIB) == ""
    local = replace(CONFIG, store=StoreConfig(path="/data/store"))
    assert advice(config=local, shard_bytes=16 * MIB) == ""


def planned(program: Program, *overrides: str) -> tuple[SlicePlan, Model]:
    """The plan of the bundled model for four chips."""
    config = composing.compose(["topology=v5e-4", "data.path=/nowhere", "store.path=/nowhere", *overrides])
    model = open_model(config.model.path, revision=None, init="random", seed=0)
    tpu_slice = parse_slice(config.topology)
    return make_slice_plan(config, model, tpu_slice, plan_job(config, model, tpu_slice), program), model


@pytest.mark.parametrize(
    ("data", "files"),
    [
        (HfData(path="json", data_files="mine.jsonl"), 1),
        (HfData(path="json", data_files=["a.json.gz", "b.json"]), 2),
        (HfData(path="json", data_files="*.jsonl"), None),
        (HfData(path="owner/name"), None),
        (ParquetData(path="FOLDER/a.parquet"), 1),
        (ParquetData(path="FOLDER/a.parquet", row_groups_per_shard=1), None),
        (ParquetData(path="FOLDER"), None),
        (GenerateData(prompts=HfData(path="csv", data_files="a.csv")), 1),
    ],
)
def test_files_are_counted_only_where_each_is_named(data, files, tmp_path) -> None:
    (tmp_path / "a.parquet").touch()
    if isinstance(data, ParquetData):
        data = replace(data, path=data.path.replace("FOLDER", str(tmp_path)))
    assert num_named_files(data) == files


@pytest.mark.parametrize(
    ("overrides", "price"),
    [([], "1.20 USD (list price on demand)"), (["plan.usd_per_chip_hour=0.5"], "0.50 USD (plan.usd_per_chip_hour)")],
)
def test_a_bill_names_the_price_and_its_source(overrides, price) -> None:
    plan, _ = planned(Program(0, 0, 0, 0, "xla", None, {}, 0.0), "run.max_tokens=100000000000", *overrides)
    assert f"price     4 chips x {plan.bill.hours:,.2f} hours x {price}; start-up" in plan.describe()


def test_few_selected_tokens_cost_less_than_a_byte_a_slot() -> None:
    """256 bytes per row of 512 tokens."""
    program = Program(0, 0, 0, 0, "xla", None, {}, 0.0, computed_twice=3)
    last = ["capture.positions=last", "capture.per_row=1", "capture.layers=[1]", "batch.length=512"]
    plan, model = planned(program, *last)
    assert plan.activation_bytes_per_slot == 2 * model.width(ActivationKey(0, Site.resid_post)) / 512
    assert "bytes per slot" in plan.describe()
    assert "the compiler recomputes 3 results to save memory; lower batch.rows" in plan.describe()
