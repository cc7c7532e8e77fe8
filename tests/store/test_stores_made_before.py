"""Stores of earlier versions still work: they are opened, verified and extended.

stores_of_0_1_0.zip holds their text and three small stores of the bundled model that version 0.1.0 made before records
had digests and roots a target.
"""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.composing import PACKAGE
from pipeline.core.errors import StoreError, StoreMismatch
from pipeline.store import ActivationStore
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.commits import read_stream_records
from pipeline.store.write.merging import merge_stores
from tests.jobs import run_here

STORES = Path(__file__).with_name("stores_of_0_1_0.zip")
ASSETS = PACKAGE / "assets"


@pytest.fixture
def stores(tmp_path: Path) -> Path:
    with zipfile.ZipFile(STORES) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def attributes(store: Path) -> dict:
    return json.loads((store / "zarr.json").read_text())["attributes"]["activation_store"]


@pytest.mark.parametrize("name", ["finished", "int8", "zstd"])
def test_a_store_is_sound_and_verify_notes_what_it_cannot_check(stores, name):
    notes: list[str] = []
    assert verify_store(str(stores / name), note=notes.append) == []
    assert ["have no digests" in notes[0], "has no digests" in notes[1]] == [True, True]
    store = ActivationStore.open(stores / name)
    assert store.statistics(2, "resid_post").count == store.num_tokens
    assert np.isfinite(store.read(2, "resid_post", store.rows).astype(np.float32)).all()


def test_damage_is_reported_without_digests(stores):
    first, second = sorted((stores / "finished/blocks.2.resid_post/c").iterdir())[:2]
    content = first.joinpath("0/0").read_bytes()
    assert content != second.joinpath("0/0").read_bytes()
    second.joinpath("0/0").write_bytes(content)
    assert str(second.relative_to(stores / "finished") / "0/0") in {p.where for p in verify_store(f"{stores}/finished")}


def test_a_store_is_extended(stores):
    path = stores / "finished"
    before = ActivationStore.open(path)
    tokens, target = before.read_tokens(before.rows).tokens, 2 * before.num_tokens
    settings = ["batch.length=32", "batch.rows=4", "data.num_streams=2", "capture.layers=[2]", "store.shard_mib=0.02"]
    run_here(f"data.path={stores / 'text'}", f"store.path={path}", f"run.max_tokens={target}", *settings)
    store = ActivationStore.open(path)
    assert store.num_tokens >= target
    np.testing.assert_array_equal(store.read_tokens(before.rows).tokens, tokens)
    assert verify_store(str(path)) == []
    assert attributes(path)["target"] == target
    records = [record for stream in range(2) for record in read_stream_records(store.storage, stream)]
    assert [record.digests is None for record in records].count(True) == sum(not r.truncated for r in before.blocks)


def test_features_without_an_index_are_read_and_extended(tmp_path, monkeypatch, compilation_cache):
    """feature_store.zip holds a store of features without statistics and index, made by an earlier version, and its
    inputs."""
    with zipfile.ZipFile(STORES.with_name("feature_store.zip")) as archive:
        archive.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert verify_store("store") == []
    before = ActivationStore.open("store")
    name = "blocks.1.attn_in"
    for asked in (lambda: before.feature(name, 3), lambda: before.feature_statistics(name)):
        with pytest.raises(StoreError, match="or by an earlier version"):
            asked()
    settings = [
        *("data.path=text", "model.path=model", "model.init=random", f"model.tokenizer={ASSETS}/tiny-qwen2"),
        *("model.dtype=float32", "batch.rows=4", "batch.length=64", "store.shard_mib=0.02", "data.num_streams=2"),
        *("capture.layers=[1]", "capture.sites=[attn_in]", "capture.encode_top=8", f"capture.encode={{{name}: sae}}"),
        compilation_cache,
    ]
    run_here(*settings, "run.max_tokens=3000", "store.path=store")
    run_here(*settings, "run.max_tokens=3000", "store.path=anew")
    store, anew = ActivationStore.open("store"), ActivationStore.open("anew")
    assert verify_store("store") == verify_store("anew") == []
    for part, values in anew.read_outputs(anew.rows).items():
        np.testing.assert_array_equal(store.read_outputs(store.rows)[part], values)
    assert store.metadata.indexed_features == ()
    assert list(tmp_path.glob("store/_features/*")) == []
    assert anew.feature(name, 3).rows.size
    with pytest.raises(StoreMismatch, match="capture.encode_index: None and True"):
        merge_stores(["store", "anew"], "merged")
