"""Slices, limits and costs, compared with figures computed by hand."""

import re
from dataclasses import replace

import pytest

from pipeline.config import composing
from pipeline.config.choices import Weights
from pipeline.core.errors import ConfigError
from pipeline.core.sites import ActivationKey, Site, activation_keys
from pipeline.models.architecture import Architecture, Experts, LocalAttention
from pipeline.models.checkpoints.loading import WeightBytes
from pipeline.models.leaves import flops_per_token, make_leaf
from pipeline.models.registry import open_model
from pipeline.planning.mesh import WeightsPlan
from pipeline.planning.slice.chips import CHIPS, parse_slice
from pipeline.planning.slice.compile_check import Program
from pipeline.planning.slice.roofline import Cost, decoding_step_s, forward_mfu, received_bytes, throughput_limits
from pipeline.planning.slice.slice_plan import described, plan_job, slice_plan
from tests.specs import LLAMA

SLICES = {
    "v5e-1": ("v5e:1x1", 1, 1),
    "v5e-8": ("v5e:2x4", 8, 1),  # a virtual machine of eight chips; machines of larger slices have four
    "v6e-16": ("v6e:4x4", 16, 4),
    "v5litepod-64": ("v5e:8x8", 64, 16),
    "v6e-32": ("v6e:4x8", 32, 8),
    "v4-8": ("v4:2x2x1", 4, 1),  # the number counts cores, two per chip
    "v4-16": ("v4:2x2x2", 8, 2),
    "v5p-64": ("v5p:2x4x4", 32, 8),
    "v5p:4x4x12": ("v5p:4x4x12", 192, 48),
    "tpu7x-128": ("tpu7x:4x4x4", 64, 16),
    "h100-8": ("h100-8", 8, 1),
    "rtx4090-1": ("rtx4090-1", 1, 1),
}


@pytest.mark.parametrize(("name", "expected"), SLICES.items())
def test_names_of_slices_give_their_chips_and_hosts(name: str, expected: tuple[str, int, int]) -> None:
    tpu_slice = parse_slice(name)
    assert (tpu_slice.name, tpu_slice.num_chips, tpu_slice.num_hosts) == expected


REFUSED = {
    "v7x-64": "Set it to a TPU slice.*v4, v5e, v5p, v6e, tpu7x, h100, rtx4090",
    "h100-16": "for one machine, of at most 8",
    "rtx4090-2": "of at most 1",
    "v5e": "Set it to a TPU slice",
    "v5e-0": "Give the shape, e.g. v5e:4x4",
    "v5e-12": "Give the shape",
    "v5p-7": "Give the shape, e.g. v5p:4x4x4",
    "v5e:4x4x4": "have 2 dimensions",
}


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_other_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_slice(name)


V5E_64 = parse_slice("v5e-64")
COST = Cost(flops=1_000_000_000, activation_bytes=5380, fill=0.5)  # with the side arrays 5400 bytes a slot


def test_every_limit_follows_from_cost_and_slice() -> None:
    assert throughput_limits(COST, V5E_64, mfu=0.4, store_bytes_per_s=21.6e9) == pytest.approx(
        {
            "compute": 64 * 197e12 * 0.4 / 2e9,  # a valid token costs two slots
            "device_to_host": 64 * 16e9 / (2 * 5380),
            "network": 64 * 3.125e9 / (2 * 5400),
            "store": 21.6e9 / 10800,
        }
    )


def test_interconnect_bytes_follow_the_topology_and_the_division() -> None:
    """At peak, with fsdp on 8x8 v5e chips, computing takes as long as gathering from 1,970 tokens per chip on."""
    rates = {"v5e:8x8": 2 * 50e9, "v5e:16x16": 4 * 50e9, "v5p:4x4x4": 6 * 100e9, "v4:2x2x1": 2 * 50e9}
    rates |= {"tpu7x:4x4x4": 3 * 100e9, "h100-8": 450e9, "h100-1": 0}  # two devices share the links of a TPU7x
    assert {name: parse_slice(name).interconnect_bytes_per_s for name in rates} == rates
    weights = WeightBytes({"q": make_leaf(LLAMA, "attention.q", "q")}, "bfloat16")
    fsdp, replicated = WeightsPlan(weights, Weights.fsdp, 0, tensor=2), WeightsPlan(weights, Weights.replicated, 0)
    assert received_bytes(fsdp, 8, summed=600, num_pair_bytes=0) == 512 * 512 * 7 // 8 + 600
    assert received_bytes(replicated, 8, summed=600, num_pair_bytes=0) == 0
    matrices, tokens = 2 * 10**9, 64 * 1970  # bytes, of 10^9 numbers
    cost = Cost(2 * 10**9, 1.0, fill=1.0, received_bytes=matrices / tokens)
    limits = throughput_limits(cost, V5E_64, mfu=1.0, store_bytes_per_s=1e30)
    assert limits["interconnect"] == pytest.approx(limits["compute"], rel=1e-3)


def test_a_decoding_step_takes_as_long_as_reading_and_gathering_its_bytes() -> None:
    assert decoding_step_s(4_095_000_000, 0, V5E_64) == pytest.approx(5e-3)
    assert decoding_step_s(819_000_000, 1_000_000_000, V5E_64) == pytest.approx(10e-3)


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


PROGRAM = Program(0, 0, 0, 0, "xla", None, {}, 0.0)


def planned(*overrides: str) -> dict:
    """The plan of the bundled model for four chips, of which one computes as fast as its limits allow."""
    job = ["topology=v5e-4", "data.path=/nowhere", "store.path=gs://bucket/store", *overrides]
    config = composing.compose(job)
    model = open_model(config.model.path, revision=None, init="random", seed=0)
    tpu_slice = parse_slice(config.topology)
    return slice_plan(config, model, tpu_slice, plan_job(config, model, tpu_slice), PROGRAM)


MANY_TOKENS = ("batch.rows=64", "batch.length=512", "store.shard_mib=64")
NOTED = {  # settings, and the note on them; none: no advice
    "small shards": (["batch.rows=64", "batch.length=512"], "store shards of 1. MiB.*raise store.shard_mib to 64-512"),
    "bound by the feed": (MANY_TOKENS, "feed limits this job to .*distributed.num_processes"),
    "bound by the store": (
        (*MANY_TOKENS[:2], "store.shard_mib=1", "capture.layers=all", "capture.sites=[q,k,v,mlp_post]"),
        "store limits this job to .*fewer layers or sites.*capture.dtype=int8",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), NOTED.values(), ids=NOTED.keys())
def test_poor_settings_are_noted_with_what_to_change(overrides, message) -> None:
    assert re.search(message, "\n".join(planned(*overrides)["notes"]))


def test_each_process_of_a_machine_feeds_its_gpus() -> None:
    feeds = {}
    for processes in (1, 2, 8):
        plan = planned("topology=h100-8", *MANY_TOKENS, f"distributed.num_processes={processes}")
        feeds[processes] = plan["limits"]["feed"]
        assert (plan["num_hosts"], plan["mesh"]["data"]) == (1, 8)
    # A process has 192, 96 or 24 cores, and one of them does 16 % of the work.
    cores = {1: 192, 2: 96, 8: 24}
    assert feeds == pytest.approx({n: n * 316_000 / (0.16 + 0.84 / cores[n]) for n in cores})
    with pytest.raises(ConfigError, match="num_processes=3 does not divide the 8 GPUs of h100-8"):
        planned("topology=h100-8", *MANY_TOKENS, "distributed.num_processes=3")


def test_reading_the_weights_limits_steps_with_few_tokens() -> None:
    """Twice the tokens per step are computed with the same reads of the weights."""
    few, many = (planned("topology=v5e-4", f"batch.rows={rows}", "batch.length=128") for rows in (4, 8))
    assert few["limits"]["hbm"] < many["limits"]["hbm"] < 2 * few["limits"]["hbm"]
    divided = planned("topology=v5e-4", "batch.rows=4", "batch.length=128", "mesh.tensor=2")
    # Bytes of weights that each chip reads per step; without the embedding.
    whole, half = (4 * 128 * 0.95 * 819e9 / p["limits"]["hbm"] - 2 * p["output_bytes"] for p in (few, divided))
    assert 0 < whole < few["weight_bytes"]
    assert half == pytest.approx(whole / 2, rel=0.05)


def test_good_settings_are_not_noted() -> None:
    notes = "\n".join(planned(*MANY_TOKENS, "store.path=/data/store")["notes"])
    assert "store.shard_mib" not in notes


def test_a_plan_is_explained_with_its_price() -> None:
    last = ["capture.positions=last", "capture.per_row=1", "capture.layers=[1]", "batch.length=512"]
    tokens = ["run.max_tokens=100000000000", "plan.usd_per_chip_hour=0.5"]
    plan = planned(*last, *tokens)
    assert f": {plan['hours']:,.2f} hours, {2 * plan['hours']:,.0f} USD, without start-up" in described(plan)
    assert plan["hours"] == pytest.approx(1e11 / min(plan["limits"].values()) / 3600)
    assert plan["terabytes"] == pytest.approx(1e11 * plan["stored_bytes_per_token"] / 1e12)
    # 256 bytes per row of 512 tokens, less than a byte per slot
    width = open_model(str(composing.PACKAGE / "assets" / "tiny-qwen2")).width(ActivationKey(0, Site.resid_post))
    assert plan["limits"]["device_to_host"] == pytest.approx(4 * 16e9 * 0.95 / (2 * width / 512))


def test_a_chip_with_two_devices_divides_its_rows() -> None:
    plan = planned("topology=tpu7x-8", *MANY_TOKENS, "run.max_tokens=1000000000")
    assert (plan["num_chips"], plan["num_hosts"], plan["mesh"]["data"], plan["rows_per_device"]) == (4, 1, 8, 8)
    assert "USD" not in described(plan)  # there is no published price
