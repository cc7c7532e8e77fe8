"""Checkpoints in files of torch.save (pytorch_model.bin) equal those in safetensors; others are refused."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import fsspec
import numpy as np
import pytest

from pipeline.core.errors import CheckpointError
from pipeline.core.sites import activation_keys
from pipeline.models.checkpoints.checkpoint import Checkpoint
from pipeline.models.checkpoints.checkpoint_files import open_files
from pipeline.models.registry import Model, open_model
from tests.hub import contents, hub_for_this_process
from tests.models import hostile_torch_files as hostile
from tests.models.hf_reference import VOCAB_SIZE, load_file, save_random, torch
from tests.models.loaded_leaves import DEVICE

WEIGHTS = "pytorch_model.bin"
INDEX = f"{WEIGHTS}.index.json"
UP = "transformer.h.1.mlp.c_fc.weight"
State = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, State]:
    """A model in safetensors, and what its authors would have saved by torch.save with an older transformers."""
    path = tmp_path_factory.mktemp("saved")
    state = save_random("gpt_neo", path, num_hidden_layers=2, attention_types=[[["global", "local"], 1]]).state_dict()
    for layer in range(2):
        state[f"transformer.h.{layer}.attn.attention.bias"] = torch.tril(torch.ones(1, 1, 9, 9, dtype=torch.bool))
        state[f"transformer.h.{layer}.attn.attention.masked_bias"] = torch.tensor(-1e9)
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    return path, state


def write(folder: Path, config: Path, state: State, num_files: int = 1) -> Path:
    """Writes a checkpoint into a new folder, in one file or several."""
    folder.mkdir()
    (folder / "config.json").write_bytes((config / "config.json").read_bytes())
    if num_files == 1:
        torch.save(state, folder / WEIGHTS)
        return folder
    names = [f"pytorch_model-{number:05}-of-{num_files:05}.bin" for number in range(1, num_files + 1)]
    file_of = {name: names[number % num_files] for number, name in enumerate(state)}
    for file in names:
        torch.save({name: values for name, values in state.items() if file_of[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": file_of}))
    return folder


def activations(model: Model) -> dict:
    keys = activation_keys(tuple(range(model.num_layers)), model.sites)
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, (2, 16), dtype=np.int32)
    positions = np.broadcast_to(np.arange(16, dtype=np.int32), tokens.shape)
    return model.apply(model.load(keys, "float32", DEVICE), tokens, np.ones_like(tokens), positions, keys=keys)


@pytest.mark.parametrize("num_files", [1, 2])
def test_files_of_torch_give_the_model_of_safetensors(num_files: int, saved, tmp_path: Path, monkeypatch) -> None:
    plain, state = saved
    expected = open_model(str(plain))
    same = open_model(str(write(tmp_path / "same", plain, load_file(plain / "model.safetensors"), num_files)))
    assert same.identity() == expected.identity()
    folder = write(tmp_path / "published", plain, state, num_files)
    remote = fsspec.filesystem("memory")
    for file in folder.iterdir():
        remote.pipe_file(f"/torch{num_files}/{file.name}", file.read_bytes())
    published, far = open_model(str(folder)), open_model(f"memory://torch{num_files}")
    got, reference = activations(far), activations(expected)
    assert got.keys() == reference.keys()
    for key, values in reference.items():
        np.testing.assert_array_equal(got[key], values, err_msg=str(key))
    assert far.identity() == published.identity()
    with hub_for_this_process(tmp_path, monkeypatch) as hub:
        hub.push("models/owner/torch", contents(folder) | {"tf_model.h5": b"", "adapter_model.bin": b""})
        assert open_model("owner/torch").identity() == published.identity()
        assert {path.name for path in tmp_path.rglob("snapshots/*/*")} == {path.name for path in folder.iterdir()}
    assert published.identity() | {"weights": None} == expected.identity() | {"weights": None}
    changed = {name: values + 1e-3 if name == UP else values for name, values in state.items()}
    other = open_model(str(write(tmp_path / "other", plain, changed, num_files)))
    assert len({model.identity()["weights"] for model in (expected, published, other)}) == 3  # masks are tensors, too


def test_tensors_are_read_from_any_part_of_a_storage(tmp_path: Path) -> None:
    x = torch.randn(6, 4)
    tensors = {
        **{"x": x, "half": x.half(), "bfloat16": x.bfloat16(), "part": x[2:5], "row": x[3], "again": x[:, None, :]},
        **{"parameter": torch.nn.Parameter(x), "long": torch.arange(5), "empty": x[:0], "unit": x[:1].T[None, :, :]},
    }
    torch.save(tensors, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint(open_files(str(tmp_path), None))
    assert {*checkpoint.names} == {*tensors}
    for name, values in tensors.items():
        info = checkpoint.info(name)
        assert info.shape == values.shape
        if name not in ("long", "empty"):
            rows = checkpoint.rows(name, 0, len(values))
            assert (info.dtype, rows.dtype.name) == (
                {2: "BF16" if name == "bfloat16" else "F16", 4: "F32"}[values.element_size()],
                str(values.dtype).removeprefix("torch."),
            )
            np.testing.assert_array_equal(rows.astype(np.float32), values.detach().float().numpy())
    np.testing.assert_array_equal(checkpoint.rows("part", 1, 3), x[3:5].numpy())


def test_a_file_may_have_thousands_of_tensors(tmp_path: Path) -> None:
    names = [f"model.layers.{number % 61}.block_sparse_moe.experts.{number}.w1.weight" for number in range(3000)]
    torch.save({name: torch.full((2,), float(number)) for number, name in enumerate(names)}, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint(open_files(str(tmp_path), None))
    assert [checkpoint.rows(name, 1, 2).item() for name in names] == list(range(3000))


def test_safetensors_are_preferred(saved, tmp_path: Path) -> None:
    plain, _ = saved
    folder = write(tmp_path / "both", plain, {"other": torch.zeros(2)})
    (folder / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
    assert open_model(str(folder)).identity() == open_model(str(plain)).identity()


def edited(edit: Callable[[dict], object]) -> Callable[[Path], object]:
    """Replaces tensors of the file."""

    def damage(folder: Path) -> None:
        state = torch.load(folder / WEIGHTS)
        edit(state)
        torch.save(state, folder / WEIGHTS)

    return damage


def indexed(file: str) -> Callable[[Path], object]:
    """Two files, whose index says that a tensor is in `file`."""

    def damage(folder: Path) -> None:
        state = torch.load(folder / WEIGHTS)
        write(folder / "new", folder, state, num_files=2)
        (folder / WEIGHTS).unlink()
        for path in (folder / "new").iterdir():
            path.rename(folder / path.name)
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][UP] = file
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def older(folder: Path) -> None:
    torch.save(torch.load(folder / WEIGHTS), folder / WEIGHTS, _use_new_zipfile_serialization=False)


def hostile_value(folder: Path) -> None:
    torch.save(dict(torch.load(folder / WEIGHTS)), folder / WEIGHTS)
    members = hostile.members_of((folder / WEIGHTS).read_bytes())
    (folder / WEIGHTS).write_bytes(hostile.with_value(members, hostile.VALUES["posix system"]))


def patched(member: str, offset: int, content: bytes) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        members = hostile.members_of((folder / WEIGHTS).read_bytes())
        (folder / WEIGHTS).write_bytes(hostile.patched(members, member, offset, content))

    return damage


DAMAGED: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "an older file": (older, "is not a zip archive: .* since torch 1.6.*Save it again"),
    "hostile": (hostile_value, "got the function or class posix.system. Nothing in it was executed"),
    "a storage beyond the end": (
        patched("x/data/0", 42, b"\xf0\xff\xff\x7f"),
        r"data/0 with [\d,]+ bytes at [\d,]+, got",
    ),
    "a named pipe": (lambda f: ((f / WEIGHTS).unlink(), os.mkfifo(f / WEIGHTS)), "is not a regular file"),
    "transposed": (edited(lambda s: s.update({UP: s[UP].T})), rf"{UP} has .*strides \(1, 32\).* contiguous"),
    "expanded": (
        edited(lambda s: s.update({UP: s[UP][:1].expand(48, 32)})),
        rf"{UP} has .*strides \(0, 1\).* contiguous",
    ),
    "a number": (edited(lambda s: s.update({UP: 3.0})), f"{UP} is missing"),
    "a foreign file": (indexed("model.safetensors"), f"{INDEX} names 'model.safetensors', expected names of bin files"),
    "another name": (lambda f: (f / WEIGHTS).rename(f / "model.pt"), "has no weights.*got .*model.pt.*save_pretrained"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_and_hostile_files_are_refused(case: str, saved, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "model", *saved)
    damage, message = DAMAGED[case]
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as refused:
        open_model(str(folder))
    assert str(folder) in str(refused.value)
    assert len(str(refused.value)) < 1500
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_file_that_was_cut_after_opening_is_refused(saved, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", *saved)
    model = open_model(str(folder))
    os.truncate(folder / WEIGHTS, 1000)
    with pytest.raises(CheckpointError, match=rf"model\.bin is not a complete file.*bytes of {UP}, got"):
        model.checkpoint.rows(UP, 0, 48)
