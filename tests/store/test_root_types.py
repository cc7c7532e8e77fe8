"""Every reader refuses an edited root, even with a matching fingerprint, without a traceback."""

import hashlib
import json

import pytest

from pipeline import delete, export, finalize, index, inspect, push, verify
from pipeline.config.composing import compose
from pipeline.core.errors import StoreInvalid
from pipeline.job.opening import open_job
from pipeline.store import ActivationStore
from tests.store.example_store import copy_store, edit_root, edited_root

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
    "widths": (5, {}, {"embed": 0}, {"embed": "4"}, {"embed": 1 << 30}, None),
    "selected": (0, "4", 4, True),
    "scale_groups": (5, {"embed": 1}, None),
    "hook_names": (5, {"embed": 1}, None),
    "summary": (5, {}, {"blocks": 5}, []),
    "target": (-1, "some", 1.5, None),
    "may_be_not_finite": (1, "true", None),
    **dict.fromkeys(
        ("weights_error", "cache_error"), ([], 5, {"embed": 0.1}, {"embed": []}, {"embed": {"token_median": "x"}})
    ),
    "capture.dtype": (5, [], "complex64", None),
    "capture.statistics": (None, 1, "true"),
    "batch.length": (0, "8", -8, 1 << 25, [8], None),
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
            with pytest.raises(StoreInvalid, match=r"zarr\.json"):
                ActivationStore.open(path)
            for main in (inspect.main, export.main, delete.main):
                given = [f"store.path={path}"] + ([f"export.path={path}-x"] if main is export.main else [])
                assert main(given) == 2, (main, value)
                printed = capsys.readouterr().err
                assert "confirm=true deletes it" not in printed
    finally:
        (path / "zarr.json").write_text(sound)
    assert ActivationStore.open(path).complete


def test_a_store_of_a_development_version_is_refused_in_one_sentence(tmp_path, capsys):
    """Its root does not have all of the layout."""
    store = tmp_path / "store"
    copy_store(str(store))
    edit_root(str(store), lambda root: [root.pop(name) for name in ("widths", "selected", "scale_groups", "summary")])
    expected = f"the store {store} was made by a development version of this program: commit d322b78 is the last one"
    for open_store in (ActivationStore.open, lambda path: open_job(compose([f"store.path={path}"]))):
        with pytest.raises(StoreInvalid, match=expected):
            open_store(store)
    more = {export: [f"export.path={tmp_path}/x"], push: ["repo=owner/name"]}
    for command in (delete, export, finalize, index, inspect, push, verify):
        assert command.main([f"store.path={store}", *more.get(command, [])]) == 2, command
        assert capsys.readouterr().err.count(expected) == 1, command


@pytest.mark.parametrize("name", ["zarr.json", "_metrics/a.jsonl"])
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
        assert inspect.main([f"store.path={path}"]) == 2
        printed = capsys.readouterr().err
        assert name.split("/")[-1] in printed
        assert "JSON" in printed
        assert len(printed) < 500
    finally:
        file.unlink() if sound is None else file.write_text(sound)
