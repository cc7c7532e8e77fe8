"""gpt-oss as published, with experts in MXFP4, against transformers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline.core.errors import CheckpointError
from pipeline.core.sites import ActivationKey, Site
from pipeline.models.registry import open_model
from tests.models.hf_reference import save_random, torch
from tests.models.loaded_leaves import assert_same_leaves, loaded_leaves

convert_moe_packed_tensors = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
LAST = ActivationKey(1, Site.resid_post)
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}


def save_packed(path: Path) -> None:
    """Writes two checkpoints of the same values: `path`/packed in MXFP4, `path`/plain in float32."""
    for name in ("packed", "plain"):
        save_random("gpt_oss", path / name, **SIZES)
    plain = load_file(path / "plain" / "model.safetensors")
    packed, rng = dict(plain), np.random.default_rng(0)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = plain[name].shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = rng.integers(118, 124, blocks.shape[:3], dtype=np.uint8)
        scales[0, 0, 0], scales[0, 1, 0] = 0, 252
        numbers = convert_moe_packed_tensors(*map(torch.from_numpy, (blocks, scales)), dtype=torch.float32)
        plain[name] = np.ascontiguousarray(numbers.numpy())
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(plain, path / "plain" / "model.safetensors")
    save_file(packed, path / "packed" / "model.safetensors")
    file = path / "packed" / "config.json"
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    save_packed(path)
    return path


@pytest.fixture
def packed(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint in MXFP4, to damage."""
    return Path(shutil.copytree(saved / "packed", tmp_path / "packed"))


@pytest.mark.parametrize(("dtype", "quantised"), [("float32", None), ("bfloat16", None), ("float32", "int8")])
def test_experts_are_unpacked_as_by_transformers(dtype: str, quantised: str | None, saved: Path) -> None:
    packed, plain = (
        loaded_leaves(open_model(str(saved / name)), (LAST,), dtype, quantised=quantised)
        for name in ("packed", "plain")
    )
    assert_same_leaves(packed, plain)


def test_a_scale_of_255_means_nan(packed: Path) -> None:
    file = packed / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[f"{name}_scales"][2, 5, 1] = 255
    save_file(tensors, file)
    got = open_model(str(packed)).checkpoint.rows(name, 2, 3)
    assert np.argwhere(np.isnan(got[0])).tolist() == [[row, 5] for row in range(32, 64)]


def cut(tensor: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(tensor[..., :1])


DAMAGES = {
    "no scales": ("_scales", None, "down_proj is missing.*down_proj_blocks is unexpected"),
    "scales of another shape": ("_scales", cut, r"down_proj has shape \(6, 64, 1\), expected \(6, 96, 64\)"),
    "blocks of another size": ("_blocks", cut, r"down_proj has shape \(6, 64, 3, 1\), expected \(6, 96, 64\)"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_tensors_that_do_not_fit_are_reported(damage: str, packed: Path) -> None:
    suffix, change, message = DAMAGES[damage]
    file = packed / "model.safetensors"
    tensors = load_file(file)
    part = f"model.layers.1.mlp.experts.down_proj{suffix}"
    changed = tensors.pop(part)
    save_file(tensors | ({part: change(changed)} if change else {}), file)
    with pytest.raises(CheckpointError, match=message):
        open_model(str(packed))
