import functools
import json
import re
from dataclasses import replace

import pytest

from pipeline.core.errors import StoreInvalid, StoreMismatch
from pipeline.core.json_text import MAX_DEPTH
from pipeline.store import ActivationStore
from pipeline.store.format.arrays import layout_of
from pipeline.store.format.metadata import Difference, StoreRoot
from pipeline.store.write.store_writer import new_root
from tests.commands.store_commands import COMMANDS, call
from tests.store.example_store import CAPTURE, copy_store, edit_root, edited_root, layout, metadata
from tests.store.hostile_stores import seal_root

ROOT = new_root(metadata(), layout())
SAE = {"features": "features.blocks.2.resid_post", "width": 64, "top": 8, "dtype": "bfloat16", "sha256": "abc"}
OTHER = SAE | {"features": "features.embed"}


def encoding(*saes: dict) -> dict:
    """The fields of metadata with these SAEs."""
    encode = {"encode": list(saes)} if saes else {}
    return {"capture": CAPTURE | {"arrays": ["blocks.2.resid_post"], **encode}}


def resealed(text: bytes, **changes: object) -> bytes:
    return edited_root(text, lambda root: root.update(changes))


def test_the_fingerprint_covers_only_what_determines_the_content():
    same = metadata(config={"run": 1}, store={"compression": "none", "path": "/elsewhere", "shard_mib": 1.0})
    assert same.fingerprint() == metadata().fingerprint()
    assert same.differences(metadata()) == []


def test_the_fingerprint_of_text_that_is_not_ascii_stays_the_same():
    """Stores are opened by versions other than the one that made them."""
    made = metadata(data={"source": "parquet", "shards": ["donn\u00e9es"]})
    assert made.fingerprint() == "d9811a3e49e900160a11cd7beb988572c1f6e06e211bfedf6bb78d97f5d7910a"


def test_the_fingerprint_does_not_depend_on_the_order_of_keys_or_on_tuples():
    data = {"shards": ("a", "b"), "source": "parquet"}
    assert metadata(data=data).fingerprint() == metadata().fingerprint()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"batch": {"length": 16, "packing": "pack"}}, [("batch.length", 8, 16)]),
        ({"num_streams": 4}, [("num_streams", 2, 4)]),
        ({"store": {"compression": "zstd"}}, [("store.compression", "none", "zstd")]),
        ({"tokenizer": {}}, [("tokenizer.sha256", "abc", None), ("tokenizer", None, {})]),
        ({"tokenizer": {"sha256": "abc", "prefix": [1]}}, [("tokenizer.prefix", None, [1])]),
        (
            {"model": {"path": "llama", "vocab_size": 5}, "rows_per_block": 1},
            [("model.path", "qwen", "llama"), ("model.vocab_size", 97, 5), ("rows_per_block", 4, 1)],
        ),
    ],
)
def test_differences_are_listed(changes, expected):
    other = metadata(**changes)
    assert other.fingerprint() != metadata().fingerprint()
    assert metadata().differences(other) == [Difference(*difference) for difference in expected]
    with pytest.raises(StoreMismatch) as caught:
        metadata().require_same(other, "/store")
    for key, stored, asked in expected:
        assert f"{key}: the store has {stored!r}, this run asks for {asked!r}" in str(caught.value)
    assert str(caught.value).endswith("\n  python -m pipeline.delete store.path=/store")  # pasted, it deletes nothing


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        ([SAE], [SAE | {"error": True}], [r"encode\[0\]\.error: the store has None, .* for true"]),
        ([SAE], [SAE | {"top": 4}], [r"encode\[0\]\.top: the store has 8, .* for 4"]),
        ([SAE, OTHER], [OTHER, SAE], [r"encode\[0\]\.features: .* for 'features\.embed'", r"encode\[1\]\.features: "]),
    ],
)
def test_differences_of_saes_are_listed_by_sae(stored, asked, expected):
    with pytest.raises(StoreMismatch) as caught:
        metadata(**encoding(*stored)).require_same(metadata(**encoding(*asked)), "/store")
    lines = str(caught.value).splitlines()[1:-2]
    assert len(lines) == len(expected), lines
    assert all(re.match(f"  capture.{line}", given) for line, given in zip(expected, lines, strict=True)), lines


def test_a_root_is_read_as_written():
    root = replace(ROOT, target=7, complete=True, summary={"blocks": "ab" * 32, "statistics": None, "ids": None})
    assert StoreRoot.from_json(root.to_json(), "it") == root
    attributes = json.loads(root.to_json())["attributes"]["activation_store"]
    assert attributes["version"] == 1
    assert attributes["fingerprint"] == metadata().fingerprint()


ARRAY = {"width": 4, "hook_name": "hook_embed", "scale_groups": None}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text[:-40], "is not JSON"),
        (lambda text: b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deep"),
        (lambda text: b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested too deeply, expected at most 64"),
        (lambda text: b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, "not the JSON of a Zarr group"),
        (lambda text: b'"\xc3"', "is not JSON.*utf-8"),
        (lambda text: b'{"name": "\\ud800"}', "is not JSON.*surrogates"),
        (lambda text: b"1" * 5000, "is not JSON.*digits"),
        (lambda text: text.replace(b'"created": "2026', b'"created": "2027'), "does not match its own checksum"),
        (lambda text: text.replace(b"activation_store", b"something_else"), "but not an activation store"),
        (lambda text: text.replace(b'"version": 1', b'"version": 2'), "version 2, but this program reads version 1"),
        (lambda text: resealed(text.replace(b'"length": 8', b'"length": 9')), "fingerprint does not match its content"),
        (lambda text: resealed(text, arrays={"embed": ARRAY}), "arrays, selected and capture disagree"),
        (
            lambda text: resealed(text.replace(b'"scale_groups": null', b'"scale_groups": 1')),
            "arrays, selected and capture disagree",
        ),
        (lambda text: resealed(text, selected=2), "arrays, selected and capture disagree"),
        (lambda text: text.replace(b'"node_type": "group"', b'"node_type": "array"'), "its own checksum"),
        (lambda text: text.replace(b'"zarr_format": 3', b'"zarr_format": 3, "more": 1'), "its own checksum"),
        (lambda text: resealed(text, arrays=["embed"]), "commit 6fe0a64 is the last one that reads it"),
        (lambda text: b"[]", "not the JSON of a Zarr group"),
        (lambda text: b'{"attributes": {"activation_store": [1]}}', "is damaged"),
        (lambda text: resealed(text.replace(b'"capture"', b'"kapture"')), "'capture' is absent"),
    ],
)
def test_damaged_roots_are_refused(edit, message):
    with pytest.raises(StoreInvalid, match=message) as caught:
        StoreRoot.from_json(edit(ROOT.to_json()), "it")
    assert caught.value.exit_code == 2


WRONG = {
    "arrays": ("embed", None, 5, *({name: ARRAY} for name in ("../x", "tokens", "blocks.01.resid_post"))),
    "arrays.embed": (1, [], None, *({**ARRAY, name: 0} for name in ARRAY)),
    "arrays.embed.width": ("4", 1 << 30, None),
    "num_streams": (0, -1, "2", 2.0, True, None, 10**30, 1 << 21, [], float("nan")),
    "rows_per_block": (0, -4, "4", 1e20, None, {}),
    "complete": (1, "true", None, []),
    "created": (5, None, []),
    "selected": (0, "4", 4, True),
    "summary": (5, {}, {"blocks": 5}, []),
    "target": (-1, "some", 1.5, None),
    "weights_error": ([], 5, {"embed": 0.1}, {"embed": []}, {"embed": {"token_median": "x"}}),
    "capture.dtype": (5, [], "complex64", None),
    "capture.statistics": (None, 1, "true"),
    "batch.length": (0, "8", -8, 1 << 25, [8], None),
    "store.compression": ("gzip", 5, None),
    "config.run": (None, 5, []),
    "config.model": (None, "x"),
    "config.data": ({"path": 5},),
    "config.run.max_tokens": ("x", -1, 1.5, []),
    **{key: (None, 5, [], "x") for key in ("model", "tokenizer", "data", "batch", "capture", "store", "config")},
}


@pytest.mark.parametrize("key", WRONG)
def test_wrong_values_are_refused(key, tmp_path):
    """Also with a matching fingerprint, and without a traceback."""
    for value in WRONG[key]:

        def edit(attributes: dict, value: object = value) -> None:
            *groups, last = key.split(".")
            functools.reduce(lambda node, group: node[group], groups, attributes)[last] = value

        (tmp_path / "zarr.json").write_text(seal_root(edited_root(ROOT.to_json(), edit).decode()))
        with pytest.raises(StoreInvalid, match=rf"zarr\.json (is damaged: '{key}|was edited)"):
            ActivationStore.open(tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_reports_a_root_that_it_cannot_read(command, tmp_path, capsys):
    store = tmp_path / "store"
    copy_store(str(store))
    edit_root(str(store), lambda root: root.update(arrays=list(root["arrays"])))
    assert call(command, store) == 2
    expected = f"the store {store} was made by a development version of this program: commit 6fe0a64 is the last one"
    assert "".join(capsys.readouterr()).count(expected) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"width": 1 << 24, "rows_per_block": 1 << 24},
        {"rows_per_block": 1 << 24, "batch": {"length": 1 << 24}},
        {"rows_per_block": 1, "batch": {"length": 16777213}, "width": 64},  # a prime number
    ],
)
def test_sizes_that_no_store_has_are_refused(changes):
    names = ("rows_per_block", "batch")
    root = replace(
        ROOT,
        metadata=metadata(**{name: changes[name] for name in names if name in changes}),
        arrays={name: {**array, "width": changes.get("width", array["width"])} for name, array in ROOT.arrays.items()},
    )
    with pytest.raises(StoreInvalid, match="expected at most"):
        layout_of(StoreRoot.from_json(root.to_json(), "it"))
