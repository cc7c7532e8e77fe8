"""Every reader refuses an edited root, even with a matching fingerprint, without a traceback."""

import hashlib
import json

import pytest

from pipeline import delete, export, finalize, index, inspect, push, verify
from pipeline.config.composing import compose
from pipeline.core.errors import StoreInvalid
from pipeline.job.opening import open_job
from pipeline.store import ActivationStore
from pipeline.store.io.digests import json_digest
from tests.store.example_store import copy_store, edited_root

COVERED = ("model", "tokenizer", "data", "batch", "capture", "num_streams", "rows_per_block")
WRONG = {
    "arrays": (
        [],
        "embed",
        ["embed", "embed"],
        ["../x"],
        [5],
        ["tokens"],
        None,
        {"embed": 1},
        ["blocks.01.resid_post"],
    ),
    "num_streams": (0, -1, "2", 2.0, True, None, 10**30, 1 << 21, [], float("nan")),
    "rows_per_block": (0, -4, "4", 1e20, None, {}),
    "complete": (1, "true", None, []),
    "created": (5, None, []),
    "blocks": (5, [1], [1, -1], ["1", 2], {"0": 1}, [1, 2, 3], [True, 1]),
    "target": (-1, "some", 1.5, None),
    "array_digests": (5, {"embed": 5}, []),
    "statistics_digests": ("x", {"embed": None}),
    "may_be_not_finite": (1, "true"),
    **dict.fromkeys(
        ("weights_error", "cache_error"), ([], 5, {"embed": 0.1}, {"embed": []}, {"embed": {"token_median": "x"}})
    ),
    "capture.dtype": (5, [], "complex64"),
    "capture.statistics": (None, 1, "true"),
    "batch.length": (0, "8", -8, 9, [8]),
    "store.compression": ("gzip", 5),
    "config.run": (None, 5, []),
    "config.model": (None, "x"),
    "config.data": ({"path": 5},),
    "config.run.max_tokens": ("x", -1, 1.5, []),
    **{key: (None, 5, [], "x") for key in ("model", "tokenizer", "data", "batch", "capture", "store", "config")},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("root") / "store"
    copy_store(str(folder))
    return folder


def edited(text: str, key: str, value: object) -> str:
    def edit(attributes: dict) -> None:
        at = attributes
        *groups, last = key.split(".")
        for group in groups:
            at = at.setdefault(group, {})
        at[last] = value
        content = {name: attributes[name] for name in COVERED}
        store = attributes["store"]
        content["store"] = {"compression": store.get("compression", "none") if isinstance(store, dict) else "none"}
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        attributes["fingerprint"] = hashlib.sha256(canonical.encode()).hexdigest()

    return edited_root(text.encode(), edit).decode()


@pytest.mark.parametrize("key", WRONG)
def test_wrong_values_are_refused(path, key, capsys):
    sound = (path / "zarr.json").read_text()
    try:
        for value in WRONG[key]:
            (path / "zarr.json").write_text(edited(sound, key, value))
            with pytest.raises(StoreInvalid, match=r"zarr\.json|was completed with"):
                ActivationStore.open(path)
            for main in (inspect.main, export.main, delete.main):
                given = [f"store.path={path}"] + ([f"export.path={path}-x"] if main is export.main else [])
                assert main(given) == 2, (main, value)
                printed = capsys.readouterr().err
                assert "confirm=true deletes it" not in printed or key in ("batch.length", "blocks")
    finally:
        (path / "zarr.json").write_text(sound)
    assert ActivationStore.open(path).complete


@pytest.mark.parametrize("lost", ["sha256", "capture.statistics"])
def test_a_store_of_a_development_version_is_refused_in_one_sentence(tmp_path, lost, capsys):
    """These had roots without a checksum, and none that says whether there are statistics."""
    store = tmp_path / "store"
    copy_store(str(store))
    root = json.loads((store / "zarr.json").read_text())
    attributes = root["attributes"]["activation_store"]
    del (attributes["capture"] if "." in lost else attributes)[lost.removeprefix("capture.")]
    if lost != "sha256":
        del attributes["sha256"]
        attributes["sha256"] = json_digest(attributes)
    (store / "zarr.json").write_text(json.dumps(root))
    expected = f"the store {store} was made by a development version"
    for open_store in (ActivationStore.open, lambda path: open_job(compose([f"store.path={path}"]))):
        with pytest.raises(StoreInvalid, match=expected):
            open_store(store)
    more = {export: [f"export.path={tmp_path}/x"], push: ["repo=owner/name"]}
    for command in (delete, export, finalize, index, inspect, push, verify):
        assert command.main([f"store.path={store}", *more.get(command, [])]) == 2, command
        assert capsys.readouterr().err.count(expected) == 1, command


@pytest.mark.parametrize("name", ["zarr.json", "embed/zarr.json", "_claims/stream-00000.json", "_metrics/a.jsonl"])
@pytest.mark.parametrize("deep", ["[" * 200_000 + "]" * 200_000, '{"a":' * 3000 + "1" + "}" * 3000, "[" * 100_000])
def test_deeply_nested_json_is_refused(path, name, deep, capsys):
    file = path / name
    sound = file.read_text() if file.exists() else None
    file.parent.mkdir(exist_ok=True)
    if name.endswith("zarr.json"):
        metadata = json.loads(sound)
        metadata["attributes"]["deep"] = "HERE"
        file.write_text(json.dumps(metadata).replace('"HERE"', deep))
    else:
        file.write_text(deep)
    try:
        main = {"_claims/stream-00000.json": delete.main}.get(name, inspect.main)
        given = ["confirm=true"] if main is delete.main else []
        assert main([f"store.path={path}", *given]) == 2
        printed = capsys.readouterr().err
        assert name.split("/")[-1] in printed
        assert "JSON" in printed
        assert len(printed) < 500
    finally:
        file.unlink() if sound is None else file.write_text(sound)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["shape"], [8, 8]),
        (["shape"], [1 << 40, 8, 4]),
        (["shape"], [8, 8, -4]),
        (["shape"], "x"),
        (["shape"], [12, 1 << 40, 4]),
        (["shape", "chunk_grid"], [1 << 31, 1 << 30, 1 << 30]),
        (["shape"], [3, 8, 4]),
        (["data_type"], "int32"),
        (["data_type"], "float64"),
        (["data_type"], {"deep": []}),
        (["chunk_grid"], [4, 8]),
        (["chunk_grid"], [8, 8, 4]),
        (["chunk_grid"], None),
        (["attributes"], []),
        (["node_type"], "group"),
    ],
)
def test_impossible_shapes_and_dtypes_are_refused(path, keys, value):
    file = path / "embed" / "zarr.json"
    sound = file.read_text()
    metadata = json.loads(sound)
    for key in keys:
        if key == "chunk_grid":
            metadata[key]["configuration"]["chunk_shape"] = value
        else:
            metadata[key] = value
    try:
        file.write_text(json.dumps(metadata))
        with pytest.raises(StoreInvalid, match="embed"):
            list(ActivationStore.open(path).batches("embed", 16))
    finally:
        file.write_text(sound)


@pytest.mark.parametrize("lost", ["_commits", "_commits/stream-00001", "_commits/stream-00000/block-000003.json"])
def test_a_complete_store_that_lost_records_is_refused(tmp_path, lost, capsys):
    path = tmp_path / "store"
    copy_store(str(path))
    (path / "_blocks" / "all.npy").unlink()
    (path / lost).rename(tmp_path / "lost")
    with pytest.raises(StoreInvalid, match=r"was completed with 6 blocks, but has records of [0-5]"):
        ActivationStore.open(path)
    assert inspect.main([f"store.path={path}"]) == 2
    assert export.main([f"store.path={path}", f"export.path={tmp_path / 'x'}"]) == 2
    assert delete.main([f"store.path={path}", "confirm=true"]) == 0
    assert not path.exists()
    capsys.readouterr()
