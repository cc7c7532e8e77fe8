"""Stores of every dtype: readers return what numpy computes from the raw arrays, close to the model's values, and the
statistics describe these stored values: they equal numpy's in float64."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import zarr

from pipeline.config import composing
from pipeline.config.choices import StorageDtype
from pipeline.config.schema import CaptureConfig
from pipeline.core.errors import ConfigError, StoreError
from pipeline.job.running import run
from pipeline.store import ActivationStore, TokenFilter
from pipeline.store.check.verifying import verify_store
from tests.jobs import write_text
from tests.planning.test_plan import BASE, planned
from tests.store.example_store import edit_root

KEYS = ["embed", "blocks.1.resid_post", "blocks.1.attn_z", "final_norm"]
STORED = {  # by name: overrides, and the largest error of a token's values in a store of one byte per value
    "float32": (["capture.dtype=float32"], None),
    "bfloat16": (["capture.dtype=bfloat16"], None),
    "int8 in groups": (["capture.dtype=int8", "capture.scale_group=32"], 0.008),
    "float8 of selected tokens": (["capture.dtype=float8_e4m3fn", "capture.positions=every", "capture.every=8"], 0.03),
}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Runs a small job, and opens its store."""
    text = write_text(tmp_path_factory.mktemp("text"), files=2, documents=10)

    def made(*overrides: str) -> ActivationStore:
        path = tmp_path_factory.mktemp("store") / "store"
        base = [f"data.path={text}", f"store.path={path}", "data.num_streams=2", "batch.rows=4", "batch.length=128"]
        sites = ["capture.layers=[1]", "capture.sites=[embed,resid_post,attn_z,final_norm]", "store.rows_per_block=8"]
        run(composing.compose([*base, *sites, "model.dtype=float32", "run.progress=false", *overrides]))
        return ActivationStore.open(path)

    return made


@pytest.fixture(scope="module")
def computed(job) -> ActivationStore:
    return job(*STORED["float32"][0])


@pytest.mark.parametrize("name", STORED)
def test_a_store_has_the_models_values_and_their_statistics(job, computed, name):
    overrides, largest_error = STORED[name]
    store = computed if name == "float32" else job(*overrides)
    assert verify_store(store.path) == []
    rows, raw = store.rows, zarr.open_group(store.path)
    valid = store.read_tokens(rows).segments > 0
    assert not valid.all()
    wanted = {}
    for key in KEYS:
        values = store.read(key, rows)
        if largest_error is not None:
            stored, scales = raw[key][:][rows], raw[f"{key}.scale"][:][rows]
            assert (stored.dtype.itemsize, scales.dtype) == (1, np.float32)
            assert scales[0, 0].size == (4 if "groups" in name else 1)  # of 128 values
            grouped = stored.reshape(*scales.shape, -1).astype(np.float32) * scales[..., None]
            np.testing.assert_array_equal(values, grouped.reshape(stored.shape))
        exact = computed.read(key, rows)
        if "selected" in name:
            exact = np.take_along_axis(exact, np.maximum(store.read_selected(rows), 0)[:, :, None], axis=1)
        tokens, exact = values[valid].astype(np.float64), exact[valid].astype(np.float64)
        error = np.linalg.norm(tokens - exact) / np.linalg.norm(tokens)
        assert error < (0.005 if largest_error is None else largest_error)
        assert_statistics(store, key, tokens, error)
        wanted[key] = values[valid]
    for stack in (False, True):
        batch = next(store.batches(KEYS, int(valid.sum()), stack=stack, dtype="float32"))
        for number, (key, values) in enumerate(wanted.items()):
            np.testing.assert_array_equal(batch.activations[:, number] if stack else batch.activations[key], values)
    norms = np.linalg.norm(wanted[KEYS[1]], axis=1)
    limits = {KEYS[1]: (float(np.median(norms)), np.inf)}
    kept = sum(len(b.tokens) for b in store.batches(KEYS[1], 64, token_filter=TokenFilter(norms=limits)))
    assert abs(kept - len(norms) / 2) <= 2
    document = store.documents()["document"][0].as_py()
    assert len(store.document(document).activations[KEYS[1]]) == len(store.document(document).tokens)


def assert_statistics(store: ActivationStore, key: str, tokens: np.ndarray, error: float) -> None:
    found = store.statistics(key)
    assert (found.count, found.not_finite) == (len(tokens), 0)
    assert store.num_activations == len(tokens)
    spread = tokens.std(axis=0)
    np.testing.assert_allclose(found.mean / spread, tokens.mean(axis=0) / spread, atol=1e-5)
    np.testing.assert_allclose(found.variance, tokens.var(axis=0), rtol=1e-5)
    norms = np.linalg.norm(tokens, axis=-1)
    assert found.mean_norm == pytest.approx(norms.mean(), rel=1e-5)
    assert found.norm_quantile(0.5) == pytest.approx(np.median(norms), rel=0.03)
    assert found.relative_error is None or found.relative_error == pytest.approx(error, rel=1e-3)
    [normalisation] = store.normalisation([key]).values()
    assert np.square(normalisation.apply(tokens)).sum(axis=1).mean() == pytest.approx(tokens.shape[1], rel=1e-4)


def test_an_unfinished_store_merges_its_blocks(computed, tmp_path):
    store = ActivationStore.open(shutil.copytree(computed.path, tmp_path / "store"))
    merged = store.statistics(KEYS[1])
    edit_root(tmp_path / "store", lambda root: root.update(complete=False))
    unfinished = ActivationStore.open(tmp_path / "store").statistics(KEYS[1])
    np.testing.assert_array_equal(unfinished.mean, merged.mean)
    np.testing.assert_allclose(unfinished.m2, merged.m2, rtol=1e-12)


def test_statistics_can_be_left_out(job):
    store = job("capture.statistics=false", "capture.sites=[embed]", "run.max_tokens=500")
    assert not [name for name in zarr.open_group(store.path) if "stats" in name]
    with pytest.raises(StoreError, match=r"capture\.statistics=false"):
        store.normalisation("embed")


def test_a_plan_counts_the_bytes_of_values_and_scales():
    def row_bytes(**capture) -> int:
        return planned(replace(BASE, capture=CaptureConfig(layers=[12], **capture))).step.row_bytes

    assert row_bytes(dtype=StorageDtype.int8) == row_bytes(dtype=StorageDtype.float8_e4m3fn) == 256 * (896 + 4)
    assert row_bytes(dtype=StorageDtype.int8, scale_group=64) == 256 * (896 + 4 * 14)


@pytest.mark.parametrize(
    ("scale_group", "message"),
    [(100, r"does not divide the width 896 of blocks.12.resid_post"), (0, "scale_group is 0")],
)
def test_groups_that_do_not_fit_are_refused(scale_group, message):
    capture = CaptureConfig(layers=[12], dtype=StorageDtype.int8, scale_group=scale_group)
    with pytest.raises(ConfigError, match=message):
        planned(replace(BASE, capture=capture))
