"""Every file of configs/model and configs/experiment composes as from the command line, and a sweep runs."""

import sys
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.config import composing
from pipeline.config.schema import RunConfig
from pipeline.core.errors import ConfigError
from pipeline.job import running
from pipeline.store.read.reader import ActivationStore
from tests.jobs import write_text

pytestmark = pytest.mark.heavy
VALUES = {  # for keys without default
    "qwen_arc": ["data.path=/tasks", "store.path=/stores/a"],
    "qwen_fineweb_edu": ["store.path=/stores/a"],
    "router_study": ["store.path=/stores/a"],
}
SWEEPS = {"sweep_sites": 9, "sweep_models": 4, "sweep_datasets": 3, "gemma_scope": 2, "diff_models": 2}


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (composing.CONFIGS / group).glob("*.yaml"))


@pytest.mark.parametrize("model", names("model"))
def test_every_model_composes(model: str) -> None:
    assert composing.compose([f"model={model}"]).model.path


@pytest.mark.parametrize("experiment", names("experiment"))
def test_every_experiment_composes_into_jobs_with_different_stores(experiment: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STORES", "gs://bucket/stores")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # main sets it for the process, which other tests share
    monkeypatch.setattr(sys, "argv", ["run", f"+experiment={experiment}", *VALUES.get(experiment, ())])
    jobs: list[RunConfig] = []
    main.main(jobs.append, "")
    assert len(jobs) == SWEEPS.get(experiment, 1)
    assert len({job.store.path for job in jobs}) == len(jobs)


@pytest.mark.parametrize(
    ("experiment", "value"), [(name, value) for name, values in VALUES.items() for value in values]
)
def test_an_experiment_does_not_inherit_a_required_value_from_the_default_job(experiment: str, value: str) -> None:
    others = [other for other in VALUES[experiment] if other != value]
    with pytest.raises(ConfigError, match=value.partition("=")[0]):
        composing.compose([f"+experiment={experiment}", *others])


def test_a_sweep_fills_one_store_per_layer_and_site(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("STORES", str(tmp_path / "stores"))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # main sets it for the process, which other tests share
    job = ["+experiment=sweep_sites", "model=tiny", f"data.path={write_text(tmp_path, files=1, documents=20)}"]
    job += ["capture.layers=[1],[3]", "capture.sites=[mlp_out]", f"hydra.sweep.dir={tmp_path / 'multirun'}"]
    job += ["batch.rows=4", "batch.length=128", "run.max_tokens=500", "run.progress=false"]
    monkeypatch.setattr(sys, "argv", ["run", *job])
    main.main(running.run, "")
    for layer in (1, 3):
        store = ActivationStore.open(tmp_path / f"stores/gpt2/blocks.{layer}.mlp_out")
        assert (store.layers, store.sites) == ((layer,), ("mlp_out",))
        assert store.num_tokens >= 500
