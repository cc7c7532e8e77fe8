"""`python -m pipeline.export export.format=delphi`: the files have the store's features."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from pipeline.export import main
from pipeline.store import ActivationStore
from tests.store.example_store import copy_store, stored_tokens
from tests.store.test_feature_batches import ENCODERS, WIDTH, write

NAMES = [name for name, *_ in ENCODERS]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> str:
    """A store of features of two SAEs, without activations."""
    return write(str(tmp_path_factory.mktemp("features")), keeps_activations=False)


def exported(store: str, path: Path, *arguments: str) -> Path:
    assert main([f"store.path={store}", f"export.path={path}", "export.format=delphi", *arguments]) == 0
    return path


def stored(store: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """All token ids [n] in row order, and the values of all features [n, F]; 0 if not stored."""
    opened = ActivationStore.open(store)
    valid = opened.read_tokens(opened.rows).segments > 0
    outputs = opened.read_outputs(opened.rows)
    index, value = (outputs[f"features.{name}.{part}"][valid] for part in ("index", "value"))
    dense = np.zeros((len(index), WIDTH + 1), np.float32)  # one more for empty slots
    np.put_along_axis(dense, index, value.astype(np.float32), axis=1)
    return opened.read_tokens(opened.rows).tokens[valid], dense[:, :WIDTH]


def edges(folder: Path) -> list[tuple[int, int]]:
    return sorted(tuple(map(int, file.stem.split("_"))) for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize(("context", "splits"), [(None, None), (5, 1), (3, 7), (1, WIDTH)])
def test_the_files_contain_the_stored_features(store, tmp_path, context, splits, capsys):
    given = [f"export.context={context}"] if context else []
    given += [f"export.splits={splits}"] if splits else []
    exported(store, tmp_path / "latents", *given)
    context = context or ActivationStore.open(store).length
    contexts, left = divmod(stored_tokens(), context)
    printed = capsys.readouterr().out
    assert f"{contexts} contexts of {context} tokens; {left} tokens left out" in printed
    assert sorted(path.name for path in (tmp_path / "latents").iterdir()) == sorted(NAMES)
    firings = 0
    for name in NAMES:
        tokens, dense = stored(store, name)
        folder = tmp_path / "latents" / name
        ranges = edges(folder)
        assert len(ranges) == (splits or 5)
        assert [first for first, _ in ranges] == [0, *(last + 1 for _, last in ranges[:-1])]
        assert ranges[-1][1] == WIDTH - 1
        found = np.zeros((contexts, context, WIDTH), np.float32)
        for first, last in ranges:
            split = load_file(folder / f"{first}_{last}.safetensors")
            np.testing.assert_array_equal(split["tokens"], tokens[: contexts * context].reshape(contexts, context))
            assert split["locations"].dtype == np.uint32
            assert split["activations"].dtype == np.float32
            row, position, feature = split["locations"].astype(np.int64).T
            flat = np.ravel_multi_index((row, position, feature), found.shape)
            assert (np.diff(flat) > 0).all()  # delphi groups contexts by consecutive locations
            found[row, position, first + feature] = split["activations"]
            firings += len(split["activations"])
        np.testing.assert_array_equal(found.reshape(-1, WIDTH), dense[: contexts * context])
    [batch] = ActivationStore.open(store).batches([], 1000, features=True)
    active = sum(int(batch.features[name].n_active[: contexts * context].sum()) for name in NAMES)
    missing = active - firings
    assert f"{firings:,} feature values; {missing:,} more were not stored" in printed
    assert missing > 0


def test_batches_of_rows_give_the_same_files(store, tmp_path, monkeypatch, capsys):
    whole = exported(store, tmp_path / "whole")
    monkeypatch.setattr("pipeline.store.read.exports.delphi.BATCH_SIZE", 3)
    in_parts = exported(store, tmp_path / "parts")
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    assert len(files) == 2 * (5 + 1)
    assert all((whole / file).read_bytes() == (in_parts / file).read_bytes() for file in files)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export.arrays=embed"], "no features of ['embed']; it has"),
        (["export.context=100000"], "less than one context of 100000"),
        (["export.splits=41"], "has only 40 features"),
        (["export.splits=0"], "export.splits=0"),
        (["export.format=csv"], "export.format=csv"),
    ],
)
def test_wrong_settings_are_refused(store, arguments, message, tmp_path, capsys):
    format_given = [] if arguments[0].startswith("export.format") else ["export.format=delphi"]
    assert main([f"store.path={store}", f"export.path={tmp_path / 'b'}", *format_given, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_a_store_without_features_is_refused(tmp_path, capsys):
    copy_store(str(tmp_path / "plain"))
    assert main([f"store.path={tmp_path / 'plain'}", f"export.path={tmp_path / 'b'}", "export.format=delphi"]) == 2
    assert "has no features" in capsys.readouterr().err
