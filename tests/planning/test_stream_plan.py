"""The number of a store's streams, and the division of tokens among them."""

from dataclasses import replace

import pytest

from pipeline.cluster.devices import Topology
from pipeline.config.schema import BatchConfig, ParquetData, RunConfig, RunOptions
from pipeline.planning.streams import MAX_AUTO_STREAMS, STREAMS_PER_PROCESS, plan_streams

BASE = RunConfig(data=ParquetData(), batch=BatchConfig(rows=8, length=256))
ONE_DEVICE = Topology(devices=1)


@pytest.mark.parametrize(
    ("max_tokens", "streams", "budgets"),
    [(10, 3, [4, 3, 3]), (9, 3, [3, 3, 3]), (1, 2, [1, 0]), (None, 2, [None, None])],
)
def test_max_tokens_is_divided_evenly(max_tokens, streams, budgets):
    config = replace(BASE, data=ParquetData(num_streams=streams), run=RunOptions(max_tokens=max_tokens))
    plan = plan_streams(config, 8, ONE_DEVICE, stored=None)
    assert [plan.budget(stream) for stream in range(streams)] == budgets


@pytest.mark.parametrize(
    ("max_tokens", "shards", "topology", "stored", "streams"),
    [
        (10_000, 8, ONE_DEVICE, None, 1),  # a small job: no second stream's last step is wasted
        (10**9, 8, ONE_DEVICE, None, 8),  # a large job, or one of unknown size: streams for processes that join later
        (10**9, 1000, ONE_DEVICE, None, MAX_AUTO_STREAMS),
        (None, 1000, ONE_DEVICE, None, STREAMS_PER_PROCESS),
        (10_000, 8, Topology(devices=4, processes=4), None, 4),
        (10_000, 100, Topology(devices=8, processes=4, world=3), None, 12),
        (None, 1000, Topology(devices=100, processes=100), None, 100),
        (10**9, 8, ONE_DEVICE, 3, 3),  # a store keeps its number of streams
    ],
)
def test_the_number_of_streams_follows_tokens_and_processes(max_tokens, shards, topology, stored, streams):
    config = replace(BASE, run=RunOptions(max_tokens=max_tokens))
    assert plan_streams(config, shards, topology, stored).count == streams


@pytest.mark.parametrize(
    ("streams", "processes", "shards", "note"),
    [
        (100, 64, 1000, "busy 78% of the time; in a new store, set data.num_streams to a multiple of 64"),
        (128, 64, 1000, None),
    ],
)
def test_streams_that_do_not_divide_among_the_processes_are_noted(streams, processes, shards, note):
    config = replace(BASE, data=ParquetData(num_streams=streams))
    topology = Topology(devices=processes, processes=processes)
    notes = " ".join(plan_streams(config, shards, topology, stored=None).notes)
    assert (note in notes) if note else ("busy" not in notes)
