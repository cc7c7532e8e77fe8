"""Stores of one byte per value: readers return what numpy computes from the raw arrays, close to the model's values."""

from dataclasses import replace

import numpy as np
import pytest
import zarr

from pipeline.config import composing
from pipeline.config.choices import StorageDtype
from pipeline.config.schema import CaptureConfig
from pipeline.core.errors import ConfigError
from pipeline.extraction.job_run import run
from pipeline.inspect import main as inspect
from pipeline.store import ActivationStore, TokenFilter
from pipeline.store.check.verifying import verify_store
from tests.jobs import write_text
from tests.planning.test_plan import BASE, planned

KEYS = ["blocks.1.resid_post", "blocks.3.attn_out"]
NAMES = ["blocks.1.resid_post", "blocks.3.attn_out"]
STORED = {
    "int8": ["capture.dtype=int8"],
    "int8 in groups": ["capture.dtype=int8", "capture.scale_group=32"],
    "int8 of selected tokens": ["capture.dtype=int8", "capture.positions=every", "capture.every=8"],
    "float8_e4m3fn": ["capture.dtype=float8_e4m3fn"],
    "float8_e4m3fn in groups": ["capture.dtype=float8_e4m3fn", "capture.scale_group=32"],
}
MOST_ERROR = {
    **{"int8": 0.01, "int8 in groups": 0.008, "int8 of selected tokens": 0.01},
    **{"float8_e4m3fn": 0.03, "float8_e4m3fn in groups": 0.03},
}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Runs a small job, and opens its store."""
    text = write_text(tmp_path_factory.mktemp("text"), files=2, documents=10)

    def made(*overrides: str) -> ActivationStore:
        path = tmp_path_factory.mktemp("store") / "store"
        base = [f"data.path={text}", f"store.path={path}", "data.num_streams=2", "batch.rows=4", "batch.length=128"]
        sites = ["capture.layers=[1,3]", "capture.sites=[resid_post,attn_out]", "store.shard_mib=1000"]
        run(composing.compose([*base, *sites, "model.dtype=float32", "run.progress=false", *overrides]))
        return ActivationStore.open(path)

    return made


@pytest.fixture(scope="module")
def computed(job) -> ActivationStore:
    return job("capture.dtype=float32")


@pytest.mark.parametrize("name", STORED)
def test_a_store_of_one_byte_per_value(job, computed, name, capsys):
    store = job(*STORED[name])
    assert verify_store(store.path) == []
    rows, raw = store.rows, zarr.open_group(store.path)
    valid = store.read_tokens(rows).segments > 0
    wanted = []
    for key, array in zip(KEYS, NAMES, strict=True):
        values = store.read(key, rows)
        stored = raw[array][:][rows]
        assert stored.dtype.itemsize == 1
        scales = raw[f"{array}.scale"][:][rows]
        assert scales.dtype == np.float32
        assert scales[0, 0].size == (4 if "groups" in name else 1)  # of 128 values
        grouped = stored.reshape(*scales.shape, -1).astype(np.float32) * scales[..., None]
        np.testing.assert_array_equal(values, grouped.reshape(stored.shape))
        values = values[valid]
        wanted.append(values)
        exact = computed.read(key, rows)
        if "selected" in name:
            exact = np.take_along_axis(exact, np.maximum(store.read_selected(rows), 0)[:, :, None], axis=1)
        exact = exact[valid].astype(np.float64)
        error = np.linalg.norm(values - exact) / np.linalg.norm(values)
        found = store.statistics(key)
        assert found.relative_error == pytest.approx(error, rel=1e-3)
        assert error < MOST_ERROR[name]
        assert found.count == store.num_activations == valid.sum()
        spread = values.std(axis=0)
        np.testing.assert_allclose(found.mean / spread, values.mean(axis=0, dtype=np.float64) / spread, atol=1e-5)
    for stack in (False, True):
        batch = next(store.batches(KEYS, int(valid.sum()), stack=stack, dtype="float32"))
        for k, values in enumerate(wanted):
            np.testing.assert_array_equal(batch.activations[:, k] if stack else batch.activations[NAMES[k]], values)
    norms = np.linalg.norm(wanted[0], axis=1)
    limits = {NAMES[0]: (float(np.median(norms)), np.inf)}
    kept = sum(len(b.tokens) for b in store.batches(KEYS[0], 64, token_filter=TokenFilter(norms=limits)))
    assert abs(kept - len(norms) / 2) <= 2
    document = store.documents()["document"][0].as_py()
    assert len(store.document(document).activations[NAMES[0]]) == len(store.document(document).tokens)
    assert inspect([f"store.path={store.path}"]) == 0
    assert f"the relative error of storing as {STORED[name][0].split('=')[1]} is" in capsys.readouterr().out


def test_a_plan_counts_the_bytes_of_values_and_scales():
    def row_bytes(**capture) -> int:
        return planned(replace(BASE, capture=CaptureConfig(layers=[12], **capture))).step.row_bytes

    assert row_bytes(dtype=StorageDtype.int8) == 256 * (896 + 4)
    assert row_bytes(dtype=StorageDtype.int8, scale_group=64) == 256 * (896 + 4 * 14)
    assert row_bytes(dtype=StorageDtype.float8_e4m3fn) == 256 * (896 + 4)


@pytest.mark.parametrize(
    ("capture", "message"),
    [
        ({"dtype": StorageDtype.int8, "scale_group": 100}, r"does not divide the width 896 of blocks.12.resid_post"),
        ({"dtype": StorageDtype.int8, "scale_group": 0}, r"capture.scale_group is 0"),
    ],
)
def test_groups_that_do_not_fit_are_refused(capture, message):
    with pytest.raises(ConfigError, match=message):
        planned(replace(BASE, capture=CaptureConfig(layers=[12], **capture)))
