"""Checkpoints with fewer bits: FP8 with a scale per block, gpt-oss' MXFP4, Kimi K2's INT4 beside vision, and Llamas in
the formats of GPTQ, AWQ and asymmetric compressed-tensors."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import CheckpointError
from pipeline.core.sites import FINAL_NORM, ActivationKey, Site
from pipeline.models.checkpoints import leaf_reading
from pipeline.models.registry import open_model
from tests.models.hf_reference import torch
from tests.models.loaded_leaves import assert_same_leaves, loaded_leaves
from tests.models.packed_files import (
    FORMATS,
    FP8,
    KIMI,
    LLAMAS,
    WEIGHTS,
    along,
    edit_config,
    of_weights,
    read_tensors,
    write_pair,
    write_tensors,
)

pytestmark = pytest.mark.heavy
LAST = ActivationKey(1, Site.resid_post)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder with the two checkpoints of a format. Only for reading."""
    path = tmp_path_factory.mktemp("saved")

    def folder(name: str) -> Path:
        if not (path / name).exists():
            write_pair(name, path / name)
        return path / name

    return folder


@pytest.fixture
def copied(saved: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a format's packed checkpoint, to change."""
    return lambda name: Path(shutil.copytree(saved(name) / "packed", tmp_path / "packed"))


@pytest.mark.parametrize(
    ("dtype", "quantised", "piece_bytes"),
    [("float32", None, 1), ("bfloat16", None, 1 << 24), ("float32", "int8", 1 << 11)],
)
@pytest.mark.parametrize("name", FORMATS)
def test_packed_weights_equal_plain_ones(
    name: str, dtype: str, quantised: str | None, piece_bytes: int, saved, monkeypatch
) -> None:
    """Also in pieces that begin and end inside blocks."""
    monkeypatch.setattr(leaf_reading, "_PIECE_BYTES", piece_bytes)
    models = [open_model(str(saved(name) / folder)) for folder in ("packed", "plain")]
    assert models[0].arch == models[1].arch
    packed, plain = (loaded_leaves(model, (LAST, FINAL_NORM), dtype, quantised=quantised) for model in models)
    assert_same_leaves(packed, plain)
    for model in models:
        model.generation.check_head()


def test_numbers_are_packed_as_by_compressed_tensors() -> None:
    packed = np.array([[1985229328, -19088744]], np.int32)  # pack_to_int32(torch.arange(-8, 8), 4) of version 0.20
    np.testing.assert_array_equal(along(np.arange(16)[None], 1), packed)


def test_a_language_model_alone_is_read(copied, saved) -> None:
    """Kimi K2 Thinking: no vision, and the quantisation in config.json itself."""
    packed = copied("kimi")
    config, tensors = json.loads((packed / "config.json").read_text()), read_tensors(packed)
    (packed / "config.json").write_text(json.dumps(config["text_config"]))
    tensors = {name.removeprefix("language_model."): tensor for name, tensor in tensors.items()}
    write_tensors(packed, {name: tensor for name, tensor in tensors.items() if "vision" not in name})
    alone, whole = (loaded_leaves(open_model(str(path)), (LAST,)) for path in (packed, saved("kimi") / "packed"))
    assert_same_leaves(alone, whole)


def test_values_and_scales_that_are_not_finite_stay_so(copied) -> None:
    packed, name = copied("fp8 qwen3"), "model.layers.1.mlp.down_proj.weight"
    tensors = read_tensors(packed)
    tensors[name].view(torch.uint8)[5, 7] = 127
    tensors[f"{name}_scale_inv"][1, 3] = torch.inf
    tensors[name].view(torch.uint8)[16:32, 36:48] = 1
    write_tensors(packed, tensors)
    got = open_model(str(packed)).checkpoint.rows(name, 3, 20)
    assert np.argwhere(np.isnan(got)).tolist() == [[2, 7]]
    infinite = {tuple(place) for place in np.argwhere(np.isinf(got))}
    assert infinite == {(row, k) for row in range(13, 17) for k in range(36, 48)}


def test_a_scale_of_255_means_nan(copied) -> None:
    packed, name = copied("mxfp4"), "model.layers.1.mlp.experts.down_proj"
    tensors = read_tensors(packed)
    tensors[f"{name}_scales"][2, 5, 1] = 255
    write_tensors(packed, tensors)
    got = open_model(str(packed)).checkpoint.rows(name, 2, 3)
    assert np.argwhere(np.isnan(got[0])).tolist() == [[row, 5] for row in range(32, 64)]


def test_names_of_unquantised_modules_do_not_matter(copied) -> None:
    packed, names = copied("fp8 qwen3"), {"modules_to_not_convert": ["lm_head"], "ignored_layers": ["lm_head"]}
    edit_config(packed, quantization_config=FP8 | names | {"scale_fmt": "ue8m0"})
    open_model(str(packed))


ROUNDED = {"config_groups": {"group_0": {"weights": WEIGHTS, "input_activations": {"num_bits": 8}}}}
REFUSED = [  # a format, another quantisation, and the message
    ("fp8 qwen3", FP8 | {"weight_block_size": None}, "weight_block_size is None, expected two whole numbers"),
    ("fp8 qwen3", FP8 | {"activation_scheme": "static"}, "activation_scheme is 'static'"),
    ("fp8 qwen3", FP8 | {"quant_method": "quanto"}, "quant_method is 'quanto'.*implemented: mxfp4"),
    ("kimi", KIMI | {"format": "float-quantized"}, "format is 'float-quantized'.*Use another checkpoint"),
    ("kimi", of_weights(num_bits=8), "num_bits is 8"),
    ("kimi", of_weights(symmetric=False), "weight is missing"),  # without zero points
    ("kimi", KIMI | ROUNDED, "sets input_activations="),
    ("gptq", LLAMAS["gptq"] | {"bits": 8}, "bits is 8"),
    ("gptq", LLAMAS["gptq"] | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    ("gptq", LLAMAS["gptq"] | {"dynamic": {"-:.*": {}}}, "dynamic is"),
    ("awq", LLAMAS["awq"] | {"version": "gemv"}, "version is 'gemv'"),
    ("awq", LLAMAS["awq"] | {"zero_point": False}, "zero_point is False"),
]


@pytest.mark.parametrize(("name", "quantization", "message"), REFUSED)
def test_other_quantisations_are_refused(name: str, quantization: dict, message: str, copied) -> None:
    packed = copied(name)
    config = json.loads((packed / "config.json").read_text())
    if name == "kimi":
        edit_config(packed, text_config=config["text_config"] | {"quantization_config": quantization})
    else:
        edit_config(packed, quantization_config=quantization)
    with pytest.raises(CheckpointError, match=message):
        open_model(str(packed))


DOWN, Q_PROJ = "model.layers.1.mlp.down_proj.weight", "model.layers.1.self_attn.q_proj"
EXPERTS = "model.layers.1.mlp.experts.down_proj"
EXPERT = f"language_model.{DOWN.replace('mlp', 'mlp.experts.2')}"
DAMAGES = [  # a format, tensors in place of its own (None: missing), and the message
    ("fp8 qwen3", {f"{DOWN}_scale_inv": None}, "down_proj.weight has dtype F8_E4M3, expected F32, F16, BF16"),
    ("fp8 qwen3", {f"{DOWN}_scale_inv": torch.ones(2, 3)}, r"F8_E4M3 \[32, 48\] with F32 \[2, 3\]"),
    ("fp8 qwen3", {DOWN: torch.ones(32, 47).to(torch.float8_e4m3fn)}, r"shape \(32, 47\), expected"),
    ("mxfp4", {f"{EXPERTS}_scales": None}, "down_proj is missing.*down_proj_blocks is unexpected"),
    (
        *("mxfp4", {f"{EXPERTS}_scales": np.ones((6, 64, 1), np.uint8)}),
        r"down_proj has dtype U8 \[6, 64, 3, 16\] with U8 \[6, 64, 1\], expected",
    ),
    (
        *("mxfp4", {f"{EXPERTS}_blocks": np.ones((6, 64, 3, 1), np.uint8)}),
        r"down_proj has dtype U8 \[6, 64, 3, 1\] with U8 \[6, 64, 3\], expected",
    ),
    ("kimi", {f"{EXPERT}_scale": None}, "2.down_proj.weight is missing.*2.down_proj.weight_packed is unexpected"),
    ("kimi", {f"{EXPERT}_scale": np.ones((31, 3), np.float32)}, r"I32 \[32, 6\] with F32 \[31, 3\]"),
    ("kimi", {f"{EXPERT}_packed": np.ones((32, 3), np.int32)}, r"shape \(32, 24\), expected \(32, 48"),
    ("gptq", {f"{Q_PROJ}.g_idx": np.full(32, 2, np.int32)}, "g_idx has numbers from 2"),
    ("awq", {f"{Q_PROJ}.qzeros": np.ones((2, 5), np.int32)}, r"\[32, 4\] with I32 \[2, 5"),
    ("awq", {f"{Q_PROJ}.qzeros": None}, "q_proj.weight is missing.*q_proj.qweight is unexpected"),
    (
        *("compressed-tensors", {f"{Q_PROJ}.weight_zero_point": np.ones((32, 2), np.int32)}),
        r"\[32, 4\] with F16 \[32, 2\] with I.* with I32 \[32, 2\]",
    ),
]


@pytest.mark.parametrize(("name", "changes", "message"), DAMAGES)
def test_tensors_that_do_not_fit_are_reported(name: str, changes: dict, message: str, copied) -> None:
    """When the model is opened; only groups' numbers are read with the weights."""
    packed = copied(name)
    tensors = read_tensors(packed) | changes
    write_tensors(packed, {tensor_name: tensor for tensor_name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(CheckpointError, match=message):
        loaded_leaves(open_model(str(packed)), (LAST,) if "g_idx" in message else ())
