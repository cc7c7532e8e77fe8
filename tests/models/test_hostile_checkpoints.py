"""Checkpoints that would exhaust memory, hang, or read other files are refused in one message."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from pipeline.core.errors import CheckpointError, ConfigError, PipelineError
from pipeline.core.json_text import MAX_JSON_BYTES
from pipeline.core.sites import ActivationKey, Site
from pipeline.models.checkpoints.checkpoint_files import open_files
from pipeline.models.registry import open_model
from tests.models.fuzz_checkpoints import INDEX, SHARDS, TINY, joined, split, write_shards

CONFIG = json.loads((TINY / "config.json").read_text())
NAME = "model.layers.1.mlp.up_proj.weight"
Damage = Callable[[Path], object]


def config(**values: object) -> Damage:
    return lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG | values))


def content(name: str, text: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(text)


def entry(**values: object) -> Damage:
    """Edits one tensor's entry in the header."""

    def edit(folder: Path) -> None:
        header, tensors = split((TINY / "model.safetensors").read_bytes())
        header[NAME] |= values
        (folder / "model.safetensors").write_bytes(joined(json.dumps(header).encode(), tensors))

    return edit


def renamed(name: str) -> Damage:
    def edit(folder: Path) -> None:
        header, tensors = split((TINY / "model.safetensors").read_bytes())
        header[name] = header.pop(NAME)
        (folder / "model.safetensors").write_bytes(joined(json.dumps(header).encode(), tensors))

    return edit


def indexed(file: object) -> Damage:
    """Two weight files, whose index says that a tensor is in `file`."""

    def edit(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        write_shards(folder)
        shutil.copy(folder / SHARDS[0], folder.parent / "outside.safetensors")
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][NAME] = file
        (folder / INDEX).write_text(json.dumps(index))

    return edit


def pipe(name: str) -> Damage:
    def edit(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return edit


def whole(value: object, most: str = "2,147,483,647") -> str:
    return rf"is {value}, expected a whole number above 0, at most {most}\. Is the file damaged"


CASES: dict[str, tuple[Damage, str]] = {
    "layers": (config(num_hidden_layers=10**9), "num_hidden_layers " + whole(10**9, "10,000")),
    "layers that the weights lack": (
        config(num_hidden_layers=9_999),
        r"layers\.6.* is missing; .*and \d{6} more\. Dow",
    ),
    "vocabulary that the weights lack": (
        config(vocab_size=10**9),
        r"has shape \(2048, 128\), expected \(1000000000, 128",
    ),
    "window": (config(max_window_layers=10**12), "max_window_layers is 10+, expected a whole number from 0 to 2,147"),
    "architectures": (config(architectures=[{}]), r"architectures is \[\{\}\], expected a list of strings"),
    "many attributes": (config(**{f"x{n}": n for n in range(500)}), "sets x0=0, .* and 480 more, which"),
    "deep": (content("config.json", b'{"a":' * 10**5), r"config\.json is not JSON: nested too deeply"),
    "large": (
        lambda folder: os.truncate(folder / "config.json", 1 << 40),
        "has 1,099,511,627,776 bytes, expected at most",
    ),
    "deep header": (content("model.safetensors", joined(b"[" * 10**5, b"")), "expected a JSON header, got nested too"),
    "large header": (
        lambda folder: (
            os.truncate(folder / "model.safetensors", os.stat(folder / "config.json").st_size + (1 << 40))
            or (folder / "model.safetensors").open("r+b").write((1 << 39).to_bytes(8, "little"))
        ),
        f"expected a header of at most {MAX_JSON_BYTES} bytes, got one of {1 << 39}",
    ),
    "offsets < 0": (entry(data_offsets=[-8, 0]), f"integers as shape and offsets of {NAME}"),
    "shape, huge": (entry(shape=[10**4000] * 50), "integers as shape and offsets"),
    "a layer's number": (renamed("model.layers." + "9" * 5000 + ".x"), r"model\.layers\.9+ is unexpected"),
    "outside": (
        indexed("../outside.safetensors"),
        r"index\.json names '\.\./outside\.safetensors', expected names of saf",
    ),
    "too long": (indexed("a" * 5000 + ".safetensors"), r"names 'a+\.\.\.a+\.safetensors', expected"),
    "pipe: config": (pipe("config.json"), r"config\.json is not a regular file"),
    "pipe: weights": (pipe("model.safetensors"), r"model\.safetensors is not a regular file"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "checkpoint"))


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_checkpoint_is_refused(case: str, folder: Path) -> None:
    damage, message = CASES[case]
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_model(str(folder))
    assert caught.value.exit_code == 2
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 6000


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (pipe("generation_config.json"), "is not a regular file"),
        (content("generation_config.json", b"[" * 10**5), "is not JSON: nested too deeply"),
        (content("generation_config.json", b"[]"), "is not a JSON object, got list"),
    ],
)
def test_a_hostile_generation_config_is_refused(damage: Damage, message: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        open_model(str(folder)).checkpoint.generation_config  # noqa: B018


@pytest.mark.parametrize(
    "values", [{"vocab_size": 2**31 - 1}, {"intermediate_size": 2**31 - 1}, {"hidden_size": 2**30}]
)
def test_random_weights_that_the_machine_cannot_hold_are_refused(values: dict[str, int], folder: Path) -> None:
    config(**values)(folder)
    model = open_model(str(folder), init="random")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(ConfigError, match=r"model\.init=random: the weights .* need [\d,]+ GiB, but this machine has"):
        model.load((ActivationKey(0, Site.resid_post),), "float32", device)


@pytest.mark.parametrize(
    "path", ["a" * 5000, "/" + "a/" * 5000, "/" + "a" * 5000, "", "a\0b", "~nosuchuser/x", "gs://"]
)
def test_a_malformed_path_is_refused(path: str, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(PipelineError, match=r"^model\.path") as caught:
        open_files(path, None)
    assert caught.value.exit_code == 2
    assert len(str(caught.value)) < 1000
