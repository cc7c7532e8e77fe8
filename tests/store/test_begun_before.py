"""Unfinished stores of a version before the division into packages are finished as that version would have.

unfinished_stores.zip holds three of the bundled model, stopped by SIGTERM after five blocks, and their text: bfloat16
without compression, int8 with zstd, and one whose documents the model writes.
"""

import zipfile
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.composing import compose
from pipeline.extraction.job_run import run
from pipeline.store import ActivationStore
from pipeline.store.check.verifying import verify_store
from tests.jobs import objects

STORES = Path(__file__).with_name("unfinished_stores.zip")
SETTINGS = [
    *("capture.layers=[2]", "data.num_streams=2", "store.shard_mib=0.02", "batch.length=32", "batch.rows=4"),
    "run.progress=false",
]
KINDS = {
    "plain": ["data=fineweb"],
    "int8": ["data=fineweb", "capture.dtype=int8", "store.compression=zstd"],
    "generated": [
        *("data=generate", "data@data.prompts=fineweb", "data.prompt_length=16", "data.long_prompts=cut"),
        *("data.max_new_tokens=8", "data.rows=4", "data.group=6", "capture.when=decode", "model.dtype=float32"),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_unfinished_store_is_finished_and_equals_a_new_one(kind: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(STORES) as archive:
        archive.extractall(tmp_path)
    begun = tmp_path / kind
    before = objects(begun)
    text = [f"data.path={tmp_path / 'text'}"]
    if kind == "generated":
        text.append(f"data.prompts.path={tmp_path / 'text'}")
    for store in (begun, tmp_path / "new"):
        run(compose([*KINDS[kind], *text, *SETTINGS, f"store.path={store}"]))
    assert verify_store(str(begun)) == []
    after = objects(begun)
    shards = [key for key in before if "/c/" in key or key.startswith(("_commits/", "_documents/"))]
    assert len(shards) > 20
    assert all(after[key] == before[key] for key in shards)

    finished, new = ActivationStore.open(begun), ActivationStore.open(tmp_path / "new")
    assert finished.complete
    assert finished.documents.equals(new.documents)
    left, right = (vars(store.read_tokens(store.rows)) for store in (finished, new))
    for name in ("tokens", "segments", "positions", "documents"):
        np.testing.assert_array_equal(left[name], right[name])
    left, right = (store.read(2, "resid_post", store.rows).astype(np.float32) for store in (finished, new))
    # Another kind of CPU may round differently, also to the next integer of int8.
    step = np.abs(right).max(axis=-1, keepdims=True) / 127 if kind == "int8" else 0
    assert (np.abs(left - right) <= 2e-2 * (1 + np.abs(right)) + 1.01 * step).all()
