"""The job's statistics describe the stored values: they equal numpy's in float64."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.composing import compose
from pipeline.core.errors import StoreError
from pipeline.extraction.job_run import run
from pipeline.store.read.reader import ActivationStore
from tests.jobs import write_text
from tests.store.example_store import edit_root

SITES = ("embed", "resid_post", "attn_z", "final_norm")
KEYS = ["embed", "blocks.1.resid_post", "blocks.1.attn_z", "final_norm"]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"), files=2, documents=25)


def job(text: Path, store: Path, *overrides: str) -> ActivationStore:
    sites = f"capture.sites=[{','.join(SITES)}]"
    run(
        compose(
            [
                *(f"data.path={text}", f"store.path={store}", "batch.rows=4", "batch.length=128", "capture.layers=[1]"),
                *(sites, "store.shard_mib=0.25", "run.progress=false", "data.num_streams=2", "run.max_tokens=4000"),
                *overrides,
            ]
        )
    )
    return ActivationStore.open(store)


@pytest.fixture(scope="module")
def as_bfloat16(text: Path, tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    return job(text, tmp_path_factory.mktemp("bfloat16") / "store", "capture.dtype=bfloat16")


def assert_equals_numpy(store: ActivationStore) -> None:
    valid = store.read_tokens(store.rows).segments > 0
    assert not valid.all()
    for key in KEYS:
        tokens = store.read(key, store.rows)[valid].astype(np.float64)
        found = store.statistics(key)
        assert (found.count, found.not_finite) == (len(tokens), 0)
        spread = tokens.std(axis=0)
        np.testing.assert_allclose(found.mean / spread, tokens.mean(axis=0) / spread, atol=1e-5)
        np.testing.assert_allclose(found.variance, tokens.var(axis=0), rtol=1e-5)
        norms = np.linalg.norm(tokens, axis=-1)
        assert found.mean_norm == pytest.approx(norms.mean(), rel=1e-5)
        assert found.norm_quantile(0.5) == pytest.approx(np.median(norms), rel=0.025)
        [normalisation] = store.normalisation([key]).values()
        assert np.square(normalisation.apply(tokens)).sum(axis=1).mean() == pytest.approx(tokens.shape[1], rel=1e-4)


def test_statistics_equal_numpys_of_the_stored_values(as_bfloat16):
    """bfloat16 has 8 bits: statistics of what the model computed, before rounding, would differ by more than 1e-5."""
    assert_equals_numpy(as_bfloat16)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_statistics_of_other_dtypes_equal_numpys(text, tmp_path, dtype):
    assert_equals_numpy(job(text, tmp_path / "store", f"capture.dtype={dtype}"))


def test_an_unfinished_store_merges_its_blocks(as_bfloat16, tmp_path):
    store = ActivationStore.open(shutil.copytree(as_bfloat16.path, tmp_path / "store"))
    merged = store.statistics("blocks.1.resid_post")
    edit_root(tmp_path / "store", lambda root: root.update(complete=False))
    unfinished = ActivationStore.open(tmp_path / "store").statistics("blocks.1.resid_post")
    np.testing.assert_array_equal(unfinished.mean, merged.mean)
    np.testing.assert_allclose(unfinished.m2, merged.m2, rtol=1e-12)


def test_statistics_can_be_left_out(text, tmp_path):
    store = job(text, tmp_path / "store", "capture.statistics=false", "capture.sites=[embed]", "run.max_tokens=500")
    assert not list((tmp_path / "store").glob("*stats*"))
    with pytest.raises(StoreError, match=r"capture\.statistics=false"):
        store.normalisation("embed")
