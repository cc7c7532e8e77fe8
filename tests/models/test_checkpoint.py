"""Damaged, incomplete and foreign checkpoints, and their addresses."""

import json
import shutil
import threading
from pathlib import Path

import fsspec
import huggingface_hub
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline.core.errors import CheckpointError, PipelineError
from pipeline.core.sites import ActivationKey, Site
from pipeline.models.checkpoints.checkpoint import Checkpoint
from pipeline.models.checkpoints.checkpoint_files import open_files
from pipeline.models.checkpoints.leaf_reading import read_leaf
from pipeline.models.checkpoints.safetensors_file import SafetensorsFile
from pipeline.models.registry import open_model
from tests.models.hf_reference import save_random

UP = "model.layers.1.mlp.up_proj.weight"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    save_random("qwen2", path)
    return path


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


def edit_tensors(path: Path, edit) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def cut(path: Path, num_bytes: int) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])


def only_an_adapter(path: Path) -> None:
    (path / "model.safetensors").rename(path / "adapter_model.safetensors")


def a_peft_folder(path: Path) -> None:
    only_an_adapter(path)
    (path / "config.json").rename(path / "adapter_config.json")


def fp8_weights(tensors: dict[str, np.ndarray]) -> None:
    tensors[UP] = tensors[UP].astype(ml_dtypes.float8_e4m3fn)


DAMAGED = {
    "cut in the tensors": (lambda p: cut(p, 20_000), "bytes, got 20000"),
    "missing tensor": (lambda p: edit_tensors(p, lambda t: t.pop(UP)), f"{UP} is missing"),
    "wrong shape": (
        lambda p: edit_tensors(p, lambda t: t.update({UP: np.zeros((47, 32), np.float32)})),
        rf"{UP} has shape \(47, 32\), expected \(48, 32\)",
    ),
    "fp8": (lambda p: edit_tensors(p, fp8_weights), f"{UP} has dtype F8_E4M3, expected F32, F16, BF16"),
    "layer beyond the model": (
        lambda p: edit_tensors(p, lambda t: t.update({"model.layers.4.mlp.up_proj.weight": t[UP]})),
        r"model\.layers\.4\.mlp\.up_proj\.weight is unexpected",
    ),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "has no weights.*model.init=random"),
    "adapter": (only_an_adapter, "an adapter's weights are for model.adapter"),
    "PEFT folder": (a_peft_folder, "is a PEFT adapter .*Set model.adapter"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_reported_when_the_model_is_opened(case: str, checkpoint: Path) -> None:
    damage, message = DAMAGED[case]
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=message) as error:
        open_model(str(checkpoint))
    assert str(checkpoint) in str(error.value)


def test_a_file_that_was_cut_after_opening_is_refused(checkpoint: Path) -> None:
    model = open_model(str(checkpoint))
    cut(checkpoint, 20_000)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors is not a complete.*bytes of {UP}, got"):
        model.checkpoint.rows(UP, 0, 48)


def test_constants_of_older_versions_are_accepted(checkpoint: Path) -> None:
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    edit_tensors(checkpoint, lambda t: t.update({name: np.zeros(4, np.float32)}))
    open_model(str(checkpoint))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda index: index.pop("weight_map"), "has no weight_map"),
        (lambda index: index["weight_map"].update({UP: "model-9-of-9.safetensors"}), "lacks model-9-of-9.safetensors"),
        (lambda index: index["weight_map"].pop(UP), f"{UP} is missing"),
    ],
)
def test_a_damaged_index_is_refused(damage, message: str, tmp_path: Path) -> None:
    save_random("qwen2", tmp_path, max_shard_size="30KB")
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    damage(index)
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        open_model(str(tmp_path))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_rows_have_the_dtype_of_the_file(dtype, tmp_path: Path) -> None:
    values = np.arange(24).reshape(6, 4).astype(dtype)
    save_file({"odd": np.zeros(3, np.uint8), "x": values}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    rows = Checkpoint(open_files(str(tmp_path), None)).rows("x", 2, 5)
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows, values[2:5])


def test_the_identity_depends_on_weights_and_not_on_the_division_into_files(tmp_path: Path) -> None:
    paths = {name: tmp_path / name for name in ("one", "many", "other")}
    save_random("qwen2", paths["one"], seed=1)
    save_random("qwen2", paths["many"], seed=1, max_shard_size="30KB")
    save_random("qwen2", paths["other"], seed=1)
    edit_tensors(paths["other"], lambda t: t.update({UP: t[UP] + np.float32(1e-3)}))
    digests = {name: open_model(str(path)).identity()["weights"] for name, path in paths.items()}
    assert len(list(paths["many"].glob("*.safetensors"))) > 1
    assert digests["one"] == digests["many"] != digests["other"]


def test_remote_files_equal_local_ones(saved: Path) -> None:
    remote = fsspec.filesystem("memory")
    for file in saved.iterdir():
        remote.pipe_file(f"/models/{saved.name}/{file.name}", file.read_bytes())
    local, far = open_model(str(saved)), open_model(f"memory://models/{saved.name}")
    assert far.identity() == local.identity()
    np.testing.assert_array_equal(far.checkpoint.rows(UP, 3, 7), local.checkpoint.rows(UP, 3, 7))


def test_several_tensors_of_a_remote_leaf_are_read_at_once(saved: Path, monkeypatch) -> None:
    remote = fsspec.filesystem("memory")
    for file in saved.iterdir():
        remote.pipe_file(f"/ahead/{saved.name}/{file.name}", file.read_bytes())
    far, local = open_model(f"memory://ahead/{saved.name}"), open_model(str(saved))
    up = far.leaves((ActivationKey(3, Site.resid_post),))["runs"][0]["mlp"]["up"]
    both, read = threading.Barrier(2), far.checkpoint.rows  # two of four tensors at a time

    def together(name: str, start: int, stop: int) -> np.ndarray:
        both.wait(60)
        return read(name, start, stop)

    monkeypatch.setattr(far.checkpoint, "rows", together)
    whole = [(slice(None),) * 3]
    got, expected = (read_leaf(model.checkpoint, up, np.dtype(np.float32), whole)[0][0] for model in (far, local))
    assert len(up.tensors) == 4
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("num_pieces", [1, 2, 16])
def test_samples_include_both_ends_of_a_tensor(num_pieces: int, saved: Path) -> None:
    file = SafetensorsFile(open_files(str(saved), None).open("model.safetensors"))
    whole = load_file(saved / "model.safetensors")[UP].tobytes()
    sample = file.sample(UP, num_pieces, 8)
    assert len(sample) == 8 * num_pieces
    assert sample.startswith(whole[:8])
    assert num_pieces == 1 or sample.endswith(whole[-8:])


def test_a_home_directory_is_expanded(saved: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(saved.parent))
    assert open_model(f"~/{saved.name}").identity() == open_model(str(saved)).identity()


def test_unknown_addresses_are_refused(tmp_path: Path) -> None:
    for path, message in [
        (str(tmp_path / "nowhere"), "neither|expected a directory"),
        ("./nowhere", "expected a directory"),
        ("nope://bucket/model", "cannot be opened"),
        ("memory://models/nowhere", "has no config.json"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            open_model(path)


@pytest.fixture
def hub_cache(saved: Path, tmp_path: Path, monkeypatch) -> Path:
    """The Hub's cache with one model in it, and no network."""
    repo = tmp_path / "models--owner--tiny"
    shutil.copytree(saved, repo / "snapshots" / COMMIT)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_model_of_the_hub_is_identified_by_its_content(hub_cache: Path, saved: Path) -> None:
    model, local = open_model("owner/tiny"), open_model(str(saved)).identity()
    assert model.identity() == local
    np.testing.assert_array_equal(model.checkpoint.rows(UP, 0, 48), load_file(saved / "model.safetensors")[UP])


def test_a_model_outside_the_cache_is_refused_offline(hub_cache: Path) -> None:
    with pytest.raises(PipelineError, match=r"owner/other: config\.json is not in the Hub's cache"):
        open_model("owner/other")
