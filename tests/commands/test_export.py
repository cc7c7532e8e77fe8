"""`python -m pipeline.export`: the data set has the store's tokens and activations. SAELens trains on one in
scripts/examples/train_with_libraries.py."""

import re
from pathlib import Path

import numpy as np
import pytest
from datasets import load_from_disk

from pipeline.export import main
from pipeline.inspect import main as inspect
from pipeline.store import ActivationStore
from pipeline.store.read.exports.saelens import FILE
from tests.store.example_store import WIDTHS, copy_store, edit_root, stored_tokens
from tests.store.test_storage import largest_file

pytestmark = pytest.mark.heavy
HOOKS = {"blocks.1.resid_post": "blocks.1.hook_resid_post", "blocks.3.resid_post": "blocks.3.hook_resid_post"}
HOOKS |= {"embed": "hook_embed"}


@pytest.fixture
def store(tmp_path) -> Path:
    copy_store(str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.mark.parametrize("context", [None, 5])
def test_contexts_contain_the_stored_tokens_in_order(store, tmp_path, context, capsys):
    given = [] if context is None else [f"export.context={context}"]
    assert main([f"store.path={store}", f"export.path={tmp_path / 'cache'}", *given]) == 0
    opened = ActivationStore.open(store)
    context = context or opened.length
    contexts = stored_tokens() // context
    assert f"{contexts} contexts of {context} tokens; {stored_tokens() - contexts * context} tokens left out" in (
        capsys.readouterr().out
    )
    found = load_from_disk(tmp_path / "cache").with_format("numpy")
    assert sorted(found.column_names) == sorted([*HOOKS.values(), "token_ids"])
    valid = opened.read_tokens(opened.rows).segments > 0
    tokens = opened.read_tokens(opened.rows).tokens[valid][: contexts * context]
    np.testing.assert_array_equal(found["token_ids"][:].reshape(-1), tokens)
    for name, hook in HOOKS.items():
        assert found.features[hook].shape == (context, WIDTHS[name])
        values = opened.arrays[name][...].read().result()[opened.rows][valid][: contexts * context]
        np.testing.assert_array_equal(found[hook][:].reshape(len(values), -1), values.astype(np.float32))


def test_chosen_arrays_are_exported_in_half_precision(store, tmp_path, capsys):
    arguments = [f"store.path={store}", f"export.path={tmp_path / 'cache'}", "export.arrays=embed,embed"]
    assert main([*arguments, "export.dtype=float16"]) == 0
    found = load_from_disk(tmp_path / "cache")
    assert found.column_names == ["hook_embed", "token_ids"]
    assert found.features["hook_embed"].dtype == "float16"


def test_a_folder_with_files_is_refused_and_what_a_killed_export_left_is_replaced(store, tmp_path, capsys):
    cache, remains = tmp_path / "cache", tmp_path / "cache.unfinished-export"
    cache.mkdir()
    (remains / "old").mkdir(parents=True)
    assert main([f"store.path={store}", f"export.path={cache}", "export.arrays=embed"]) == 0
    assert not remains.exists()
    before = {file: file.read_bytes() for file in cache.iterdir()}
    assert sorted(file.name for file in before) == [FILE, "dataset_info.json", "state.json"]
    assert main([f"store.path={store}", f"export.path={cache}"]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in cache.iterdir()} == before


def test_a_full_disk_is_reported_and_the_export_can_be_repeated(store, tmp_path, capsys):
    arguments = [f"store.path={store}", f"export.path={tmp_path / 'cache'}"]
    with largest_file(2000):
        assert main(arguments) == 1
    error = capsys.readouterr().err
    assert f"export.path={tmp_path / 'cache'} cannot be written: " in error
    assert "File too large" in error
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert main(arguments) == 0


def test_paths_that_cannot_be_written_are_refused(store, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for path in ("file", "file/x", "x" * 300, "x/" * 3000, "~nosuchuser/x", "a\0b", " ", "gs://bucket/x", "\udcff"):
        assert main([f"store.path={store}", f"export.path={path}"]) == 2, path
        assert "export.path=" in capsys.readouterr().err.replace(" is ", "=")
        if path not in ("gs://bucket/x", "x/" * 3000):
            assert inspect([f"store.path={store}", f"inspect.html={path}"]) == (2 if path != "file" else 0), path
            capsys.readouterr()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("hook", [None, 5, "", "token_ids", "hook_embed", {"deep": [[]]}])
def test_edited_hook_names_are_refused(store, tmp_path, hook, capsys):
    edit_root(store, lambda root: root["arrays"]["blocks.3.resid_post"].update(hook_name=hook))
    names = "export.arrays=embed,blocks.3.resid_post"
    assert main([f"store.path={store}", f"export.path={tmp_path / 'cache'}", names]) == 2
    message = "has the name" if isinstance(hook, str) else "hook_name"
    assert re.search(rf"store/zarr\.json .*{message}", capsys.readouterr().err)


def test_values_that_do_not_fit_are_refused(store, tmp_path, capsys):
    array = ActivationStore.open(store).arrays["embed"]
    values = array[0].read().result()
    values[0, 0] = 1e5
    array[0].write(values).result()
    assert main([f"store.path={store}", f"export.path={tmp_path / 'cache'}", "export.dtype=float16"]) == 2
    assert "export.dtype=float16: embed has values outside its range" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage"),
        (["export.path=gs://b"], "this command writes local files"),
        (["export.path=b", "export.context=0"], "export.context=0"),
        (["export.path=b", "export.context=100000"], "less than one context of 100000"),
        (["export.path=b", "export.dtype=int8"], "export.dtype=int8"),
        (["export.path=b", "export.splits=2"], "only for export.format=delphi"),
        (["export.path=b", "export.array=x"], "'export.array=x' is not a setting"),
        (["export.path=b", "export.arrays=embed,blocks.9.v"], "the store has no ['blocks.9.v']; it has"),
    ],
)
def test_wrong_settings_are_refused(store, arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([f"store.path={store}", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
