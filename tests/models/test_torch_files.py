"""SAEs in files of torch.save: read without torch, equal to their authors' code; nothing in them is executed."""

import io
import json
import pickle
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pytest

from pipeline.core.errors import CheckpointError
from pipeline.models.checkpoints.checkpoint_files import Files
from pipeline.models.checkpoints.torch_file import TorchFile
from pipeline.models.sae.loading import open_sae
from tests.hub import contents, hub_for_this_process
from tests.models import hostile_torch_files as hostile
from tests.models import torch_saes
from tests.models.sae_files import D_IN, WIDTH, K, encode_dense, normal, write_json

torch = pytest.importorskip("torch")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def write(kind: str, folder: Path, change: dict[str, object] | None = None, **trainer: object) -> str:
    """Writes an SAE, with some tensors replaced. Returns its address."""
    state = torch_saes.state_dict(kind, np.random.default_rng(0)) | (change or {})
    return str(torch_saes.write(kind, folder, state, torch.save, **trainer))


HOOKS = dict.fromkeys(torch_saes.CLASSES, "blocks.12.hook_resid_post") | {
    "Qwen-Scope": "blocks.7.hook_resid_post",
    "Goodfire": "blocks.19.hook_resid_post",
    "DeepSeek-R1": "blocks.19.hook_resid_post",
    "hook_z": "blocks.3.attn.hook_z",
}


@pytest.mark.parametrize("kind", torch_saes.FILES)
def test_an_sae_computes_what_its_authors_code_does(kind: str, tmp_path: Path, rng):
    sae, x = open_sae(write(kind, tmp_path)), normal(rng, 200, D_IN, scale=2.0) + np.float32(0.3)
    state = torch_saes.state_dict(kind, np.random.default_rng(0))
    wide = {name: values.astype(np.float64) for name, values in state.items()}
    expected, values = torch_saes.features(kind, wide, x.astype(np.float64)), encode_dense(sae, x)
    np.testing.assert_array_equal(values > 0, expected > 0)
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5)
    assert 0 < np.count_nonzero(values) < values.size * 0.6
    assert sae.hook_name == HOOKS[kind]
    assert all(values.flags.c_contiguous and values.shape == sae.shapes[name] for name, values in sae.arrays().items())


def test_what_a_file_says_of_its_training_is_kept(tmp_path: Path):
    contexts = {
        kind: open_sae(write(kind, tmp_path / kind)).context for kind in ("AutoEncoder", "Qwen-Scope", "hook_z")
    }
    assert {kind: (context.model_name, context.context_size) for kind, context in contexts.items()} == {
        "AutoEncoder": ("org/tiny", 128),
        "Qwen-Scope": ("Qwen/Qwen3-1.7B-Base", None),
        "hook_z": ("gpt2-small", 128),
    }


@pytest.mark.parametrize(
    ("module", "end", "hook_name", "is_transcoder"),
    [
        ("mlp_out_layer_3", "out", "blocks.3.mlp.hook_out", False),
        ("mlp_out_layer_3", "in", "blocks.3.mlp.hook_in", False),
        ("mlp_out_layer_3", "in_and_out", "blocks.3.mlp.hook_in", True),
        ("attention_out_layer_0", "out", "blocks.0.attn.hook_out", False),
        ("attention_out_layer_0", "in", "blocks.0.attn.hook_in", False),
        (None, "in", "blocks.12.hook_resid_pre", False),
        (None, None, "blocks.12.hook_resid_post", False),
        ("other_layer_3", "out", None, False),
    ],
)
def test_saes_read_either_end_of_a_module(module, end, hook_name, is_transcoder, tmp_path: Path):
    address = write("AutoEncoder", tmp_path, submodule_name=module)
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", config | {"buffer": {"io": end}})
    sae = open_sae(address)
    assert (sae.hook_name, sae.spec.is_transcoder) == (hook_name, is_transcoder)


@pytest.mark.parametrize("has_checksums", [True, False])
def test_tensors_of_any_layout_are_read(has_checksums: bool, tmp_path: Path):
    x = torch.randn(5, 6, 4)
    tensors = {
        **{"x": x, "permuted": x.permute(2, 0, 1), "part": x[1:3, ::2, 1:3], "last": x[4, 5], "scalar": x[0, 0, 0]},
        **{"half": x.half(), "bfloat16": x.bfloat16(), "empty": torch.zeros(4, 0, 1), "ones": torch.ones(1, 4, 1)},
        "parameter": torch.nn.Parameter(x),
        "_orig_mod.compiled": x + 1,
    }
    plain = {"int": 7, "float": 0.5, "text": "a", "none": None, "flag": True, "list": [1, (2, {})], "large": 1 << 40}
    torch.serialization.set_crc32_options(has_checksums)
    try:
        torch.save({**tensors, **plain, "steps": torch.tensor(3)}, tmp_path / "modèle.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    file = TorchFile(Files(str(tmp_path)).open("modèle.pt"))
    expected = {name.removeprefix("_orig_mod."): values for name, values in tensors.items()}
    assert file.shapes.keys() == expected.keys() | plain.keys() | {"steps"}
    for name, values in expected.items():
        read = file.read(name)
        assert (read.dtype.name, read.shape) == (str(values.dtype).partition(".")[2], tuple(values.shape))
        np.testing.assert_array_equal(read.astype(np.float32), values.detach().float().numpy())
    for name in plain:
        with pytest.raises(CheckpointError, match=f"{name} has dtype none, expected one of F32"):
            file.read(name)
    with pytest.raises(CheckpointError, match="steps has dtype I64, expected one of F32"):
        file.read("steps")


SAVED: dict[str, tuple[Callable[[dict[str, object], Path], object], str]] = {
    "protocol 4": (partial(torch.save, pickle_protocol=4), "got pickle protocol 4, which torch.save uses only if"),
    "a module": (lambda state, file: torch.save(torch.nn.Linear(2, 3), file), "class torch.nn.modules.linear.Linear"),
    "a tensor": (lambda state, file: torch.save(torch.ones(3), file), "got a tensor in place of a dict"),
    "TorchScript": (
        lambda state, file: torch.jit.save(torch.jit.script(torch.nn.Linear(2, 3)), file),
        "stor.*compr.*Save only the state dict",
    ),
    "expanded": (
        lambda state, file: torch.save({"a": torch.ones(3).expand(4, 3)}, file),
        "a within 3 elements, got 12 of.*Save an expanded tensor as tensor.contiguous",
    ),
    "float8": (
        lambda state, file: torch.save({"a": torch.ones(3).to(torch.float8_e4m3fn)}, file),
        "_rebuild_tensor_v3",
    ),
    "NumPy's": (lambda state, file: torch.save({"a": np.float32(3)}, file), "multiarray.scalar"),
    "no tensors": (
        lambda state, file: torch.save({}, file),
        "is not a state dict|expected enc",
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("case", SAVED)
def test_files_that_are_not_a_state_dict_are_refused(case: str, tmp_path: Path):
    save, message = SAVED[case]
    address = torch_saes.write("Goodfire", tmp_path, torch_saes.state_dict("Goodfire", np.random.default_rng(0)), save)
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        open_sae(str(address))


REFUSED: dict[str, tuple[str, dict[str, object], dict[str, object], str]] = {
    "class": ("AutoEncoder", {}, {"dict_class": "CrossCoder"}, "dict_class is 'CrossCoder', which is not implemented"),
    "width": ("AutoEncoder", {}, {"dict_size": WIDTH + 1}, r"encoder.weight has shape \(40, 12\), expected \(41, 12\)"),
    "threshold": ("AutoEncoder", {"threshold": np.float32(1)}, {}, "threshold is unexpected"),
    "a text": ("AutoEncoder", {"bias": "text"}, {}, "bias has dtype none, expected F32"),
    "k": ("AutoEncoderTopK", {}, {"k": WIDTH + 1}, "k is 41, expected a whole number above 0, at most 40"),
    "another k": ("AutoEncoderTopK", {}, {"k": K + 1}, f"k is {K}, expected {K + 1} as in config.json"),
    "NaN": (
        "BatchTopKSAE",
        {"threshold": np.float32(np.nan)},
        {},
        "expected a finite number above -inf as thresh",
    ),
    "orientation": (
        "Qwen-Scope",
        {"W_dec": np.zeros((1024, D_IN), np.float32)},
        {},
        r"W_dec has shape \(1024, 12\), expected \(12, 1024\)",
    ),
    "axes": ("Qwen-Scope", {"b_enc": np.zeros((K, 1), np.float32)}, {}, "expected b_dec with the axes D, b_enc with"),
    "names": ("Goodfire", {"encoder_linear.weight": np.zeros(3)}, {}, "encoder_linear.weight with the axes F D, got"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_saes_that_differ_from_their_configuration_are_refused(case: str, tmp_path: Path):
    kind, change, trainer, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        open_sae(write(kind, tmp_path, change, **trainer))


def test_files_are_named_in_addresses(tmp_path: Path, monkeypatch):
    write("AutoEncoder", tmp_path / "saes" / "trainer_0")
    write("Qwen-Scope", tmp_path / "saes")
    folder = torch_saes.FILES["Qwen-Scope"].partition("/")[0]
    (tmp_path / "saes" / "other").mkdir()
    (tmp_path / "saes" / "other" / "weights.bin").write_bytes(b"")
    fs = fsspec.filesystem("memory")
    for path, content in contents(tmp_path).items():
        fs.pipe_file(f"/torch/{path}", content)
    with hub_for_this_process(tmp_path / "hub", monkeypatch) as server:
        server.push("models/owner/saes", contents(tmp_path / "saes"))
        server.push(f"models/owner/{folder}", contents(tmp_path / "saes" / folder))
        assert open_sae(f"hf://owner/{folder}/layer7.sae.pt").spec.k == K
        for path in ("trainer_0/ae.pt", "trainer_0", f"{folder}/layer7.sae.pt"):
            addresses = [f"{tmp_path}/saes/{path}", f"memory://torch/saes/{path}", f"hf://owner/saes/{path}"]
            assert len({open_sae(address).identity for address in addresses}) == 1
        with pytest.raises(CheckpointError, match="none of layer8.sae.pt"):
            open_sae(f"hf://owner/saes/{folder}/layer8.sae.pt")
    monkeypatch.chdir(tmp_path / "saes" / folder)
    for address in ("layer7.sae.pt", "./layer7.sae.pt", f"../{folder}/layer7.sae.pt"):
        assert open_sae(address).spec.k == K
    monkeypatch.chdir(tmp_path / "saes" / "trainer_0")
    assert {open_sae(address).spec.width for address in ("ae.pt", ".", "./", "../trainer_0/ae.pt")} == {WIDTH}
    shutil.copytree(tmp_path / "saes" / folder, tmp_path / "saes" / "renamed")
    (tmp_path / "saes" / "other" / "folder.pt").mkdir()
    for address, message in (
        (f"{tmp_path}/saes/{folder}", f"Name the file of one SAE: .*{folder}/layer7.sae.pt"),
        (f"{tmp_path}/saes/{folder}/layer8.sae.pt", "but there is no such file"),
        ("../renamed/layer7.sae.pt", "expected a folder with the name of Qwen-Scope's repository"),
        ("/layer7.sae.pt", "but there is no such file"),
        (f"{tmp_path}/saes/other", "The name of a file of torch tells its format: ae.pt"),
        (f"{tmp_path}/saes/other/weights.bin", "expected a folder, a remote folder"),
        (f"{tmp_path}/saes/other/folder.pt", "folder.pt is not an SAE: expected cfg.json"),
        (f"{tmp_path}/saes/absent.bin", "expected a folder, a remote folder"),
        (f"{tmp_path}/saes/other/ae.pt", "got .*weights.bin"),
    ):
        with pytest.raises(CheckpointError, match=message):
            open_sae(address)


@pytest.fixture(scope="module")
def members() -> dict[str, bytes]:
    """The members of a valid file, and a storage of 4 numbers without a tensor."""
    sink = io.BytesIO()
    state = torch_saes.state_dict("Goodfire", np.random.default_rng(0))
    torch.save({name: torch.from_numpy(values) for name, values in state.items()}, sink)
    return hostile.members_of(sink.getvalue()) | {"x/data/9": bytes(16)}


def refusal(content: bytes, folder: Path) -> str:
    """The message with which an SAE's file is refused."""
    file = folder / torch_saes.FILES["Goodfire"]
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as refused:
        open_sae(str(file)).arrays()
    return str(refused.value)


def test_what_hostile_files_change_is_valid(members, tmp_path: Path):
    for instructions in (hostile.tensor(), hostile.push(1), hostile.doubled(hostile.push(())), b"]q\1h\1a"):
        assert "extra is unexpected" in refusal(hostile.with_value(members, instructions), tmp_path)
    [file] = tmp_path.iterdir()
    older = {name: content for name, content in members.items() if "data" in name}  # as torch 1.6 writes
    for part in (members, older):
        file.write_bytes(hostile.archive(part))
        assert len(open_sae(str(file)).arrays()) == 4


def test_python_executes_what_hostile_files_contain(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickle.loads(b"\x80\2" + hostile.VALUES["os system"] + b".")
    assert (tmp_path / hostile.CANARY).exists()


@pytest.mark.parametrize("case", [*hostile.VALUES, *hostile.ARCHIVES])
def test_hostile_files_are_refused_and_execute_nothing(case: str, members, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    is_value = case in hostile.VALUES
    content = hostile.with_value(members, hostile.VALUES[case]) if is_value else hostile.ARCHIVES[case](members)
    message = refusal(content, tmp_path)
    assert re.search("expected .*(again|Save|Use another)", message), message
    assert len(message) < 1500
    assert len(list(tmp_path.iterdir())) == 1


def test_random_damage_never_raises_another_error(members, tmp_path: Path, rng):
    """In the archive, and in a pickle with a valid checksum."""
    file = tmp_path / torch_saes.FILES["Goodfire"]
    expected = members["x/data.pkl"], hostile.archive(members)
    num_valid = 0
    for number in range(600):
        damaged = bytearray(expected[number % 2])
        for place in rng.integers(0, len(damaged), size=rng.integers(1, 4)):
            damaged[place : place + 1] = [b"", rng.bytes(1), rng.bytes(2)][rng.integers(3)]
        file.write_bytes(damaged if number % 2 else hostile.archive({**members, "x/data.pkl": bytes(damaged)}))
        try:
            open_sae(str(file)).arrays()
            num_valid += 1
        except CheckpointError:
            pass
    assert 0 < num_valid < 100  # in parts of a pickle that have no effect, such as a tensor's device
