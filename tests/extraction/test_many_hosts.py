"""64 processes, killed at random, fill one store: it equals that of one process, byte by byte."""

import pytest

from pipeline.store.check.verifying import verify_store
from scripts.bench.bench_hosts import Shape, differences, make_text, open_hosts_job, run_host, run_hosts
from tests.conftest import MEASURED
from tests.jobs import assert_same_store


@pytest.mark.slow
def test_64_hosts_of_which_20_are_killed_make_the_same_store(tmp_path, record_property):
    shape = Shape(blocks=2000, streams=200, hosts=64, kills=20)
    text, store, reference = (tmp_path / name for name in ("text", "store", "reference"))
    make_text(text, shape)
    figures = run_hosts(text, str(store), shape)
    assert figures.killed == shape.kills
    assert differences(open_hosts_job(text, str(store), shape)) == []
    assert verify_store(str(store)) == []
    run_host(text, str(reference), shape, [0], 0)
    assert_same_store(store, reference)
    record_property(MEASURED, f"64 hosts, 2,000 blocks: {figures}")
