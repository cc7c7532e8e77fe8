"""Models published in FP8, with a scale per block, against transformers and the formula."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import CheckpointError
from pipeline.core.sites import ActivationKey, Site
from pipeline.models.checkpoints import leaf_reading
from pipeline.models.registry import open_model
from tests.models.hf_reference import save_random, torch
from tests.models.loaded_leaves import assert_same_leaves, loaded_leaves

safetensors_torch = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.heavy
load_file, save_file = safetensors_torch.load_file, safetensors_torch.save_file
Fp8Dequantize = pytest.importorskip("transformers.integrations.finegrained_fp8").Fp8Dequantize
LAST = ActivationKey(1, Site.resid_post)
BLOCK = [16, 12]  # divides only some sizes of the tiny models
PUBLISHED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": BLOCK}
FAMILIES = {"deepseek_v3": torch.float32, "qwen3": torch.bfloat16, "qwen3_moe": torch.float16}  # the scales' dtype


def dequantised(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantises by the formula of the model's own code; compares with transformers, which needs whole blocks."""
    sizes = [-(-size // part) for size, part in zip(numbers.shape, BLOCK, strict=True)]
    assert list(scales.shape) == sizes
    spread = scales.float().repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    by_formula = numbers.float() * spread[: numbers.shape[0], : numbers.shape[1]]
    if all(size % part == 0 for size, part in zip(numbers.shape, BLOCK, strict=True)):
        np.testing.assert_array_equal(Fp8Dequantize(None)._dequantize_one(numbers, scales, torch.float32), by_formula)
    return by_formula


def save_fp8(path: Path, family: str) -> None:
    """Writes two checkpoints of the same values: `path`/packed in FP8, `path`/plain in float32."""
    for name in ("packed", "plain"):
        save_random(family, path / name, num_hidden_layers=2)
    plain = load_file(path / "plain" / "model.safetensors")
    packed = dict(plain)
    random = torch.Generator().manual_seed(0)
    for name in [name for name in plain if name.endswith("_proj.weight") or name.endswith("_with_mqa.weight")]:
        numbers = torch.randint(0, 255, plain[name].shape, dtype=torch.uint8, generator=random)
        numbers = torch.where(numbers == 127, 126, numbers).view(torch.float8_e4m3fn)  # 127 and 255 are not numbers
        blocks = [-(-size // part) for size, part in zip(numbers.shape, BLOCK, strict=True)]
        scales = (torch.rand(blocks, generator=random) * 1e-3).to(FAMILIES[family])
        plain[name] = dequantised(numbers, scales)
        packed |= {name: numbers, f"{name}_scale_inv": scales}
    assert len(packed) > len(plain) + 8
    save_file(plain, path / "plain" / "model.safetensors")
    save_file(packed, path / "packed" / "model.safetensors")
    quantise_config(path / "packed", PUBLISHED)


def quantise_config(path: Path, quantization: dict) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the two checkpoints of each family."""
    path = tmp_path_factory.mktemp("saved")
    for family in FAMILIES:
        save_fp8(path / family, family)
    return path


@pytest.fixture
def packed(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint in FP8, to damage."""
    return Path(shutil.copytree(saved / "qwen3" / "packed", tmp_path / "packed"))


@pytest.mark.parametrize(
    ("dtype", "quantised", "piece_bytes"),
    [("float32", None, 1), ("bfloat16", None, 1 << 24), ("float32", "int8", 1 << 11)],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_weights_equal_dequantised_ones(
    family: str, dtype: str, quantised: str | None, piece_bytes: int, saved: Path, monkeypatch
) -> None:
    """Also in pieces that begin and end inside blocks."""
    monkeypatch.setattr(leaf_reading, "_PIECE_BYTES", piece_bytes)
    packed, plain = (
        loaded_leaves(open_model(str(saved / family / name)), (LAST,), dtype, quantised=quantised)
        for name in ("packed", "plain")
    )
    assert_same_leaves(packed, plain)


def test_values_and_scales_that_are_not_finite_stay_so(packed: Path) -> None:
    name, file = "model.layers.1.mlp.down_proj.weight", packed / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(torch.uint8)[5, 7] = 127
    tensors[f"{name}_scale_inv"][1, 3] = torch.inf
    tensors[name].view(torch.uint8)[16:32, 36:48] = 1
    save_file(tensors, file)
    got = open_model(str(packed)).checkpoint.rows(name, 3, 20)
    assert np.argwhere(np.isnan(got)).tolist() == [[2, 7]]
    assert {tuple(place) for place in np.argwhere(np.isinf(got))} == {
        (row, k) for row in range(13, 17) for k in range(36, 48)
    }


def without(key: str) -> dict:
    return {name: value for name, value in PUBLISHED.items() if name != key}


REFUSED = {
    "one scale": (PUBLISHED | {"weight_block_size": None}, "weight_block_size is None, expected two whole numbers"),
    "activations with scales": (PUBLISHED | {"activation_scheme": "static"}, "activation_scheme is 'static'"),
    "another method": (
        PUBLISHED | {"quant_method": "quanto"},
        "quantization_config: expected .* compressed-tensors weights, got 'quanto'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_quantisations_are_refused(case: str, packed: Path) -> None:
    quantization, message = REFUSED[case]
    quantise_config(packed, quantization)
    with pytest.raises(CheckpointError, match=message):
        open_model(str(packed))


def test_names_of_unquantised_modules_do_not_matter(packed: Path) -> None:
    names = {"modules_to_not_convert": ["lm_head"], "ignored_layers": ["lm_head"]}
    quantise_config(packed, PUBLISHED | names | {"scale_fmt": "ue8m0"})
    open_model(str(packed))


NAME = "model.layers.1.mlp.down_proj.weight"
DAMAGES = {
    "no scales": ({f"{NAME}_scale_inv": None}, "down_proj.weight has dtype F8_E4M3, expected F32, F16, BF16"),
    "scales of another shape": ({f"{NAME}_scale_inv": torch.ones(2, 3)}, r"F8_E4M3 with scales F32 \[2, 3\]"),
    "numbers of another shape": ({NAME: torch.ones(32, 47).to(torch.float8_e4m3fn)}, r"shape \(32, 47\), expected"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_tensors_that_do_not_fit_are_reported(damage: str, packed: Path) -> None:
    changes, message = DAMAGES[damage]
    file = packed / "model.safetensors"
    tensors = load_file(file) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(CheckpointError, match=message):
        open_model(str(packed))
