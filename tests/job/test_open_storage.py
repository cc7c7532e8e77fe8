"""The configuration's limits on requests, for one process of a job."""

import jax
import pytest

from pipeline.config.composing import compose
from pipeline.job.opening import open_job, open_storage
from tests.jobs import write_text

LIMITER = "experimental_gcs_rate_limiter"


def test_the_limit_on_writes_is_divided_among_processes():
    config = compose(["data.path=none", "store.path=gs://bucket/store", "store.ramp_up=1000"])
    spec = open_storage(config.store, 16).context.spec.to_json()
    assert spec[LIMITER] == {"write_rate": 62.5, "doubling_time": "20m"}


@pytest.mark.parametrize(("processes", "rate"), [(1, 1000.0), (4, 250.0)])
def test_a_job_counts_its_processes(processes, rate, tmp_path, monkeypatch):
    class Opened(Exception):
        pass

    def stop(storage):
        raise Opened(storage.context.spec.to_json()[LIMITER]["write_rate"])

    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: processes > 1)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr("pipeline.job.opening.read_metadata", stop)
    text = write_text(tmp_path / "text", files=1, documents=1)
    overrides = [f"data.path={text}", "store.path=gs://bucket/store", "store.ramp_up=1000"]
    with pytest.raises(Opened) as opened:
        open_job(compose(overrides))
    assert opened.value.args == (rate,)
