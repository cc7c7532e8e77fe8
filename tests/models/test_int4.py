"""Checkpoints in 4 bits: Kimi K2's models as published, with the tensors of a language model beside those of vision,
and Llamas in the formats of GPTQ, AWQ and asymmetric compressed-tensors."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline.core.errors import CheckpointError
from pipeline.core.sites import FINAL_NORM, ActivationKey, Site
from pipeline.models.checkpoints import leaf_reading
from pipeline.models.checkpoints.packed import int4
from pipeline.models.registry import open_model
from tests.models.hf_reference import save_random
from tests.models.loaded_leaves import assert_same_leaves, loaded_leaves

pytestmark = pytest.mark.heavy
LAST = ActivationKey(1, Site.resid_post)
GROUP = 16  # 32 inputs of gate and up are two groups, 48 of down are three
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False}
WEIGHTS |= {"actorder": None, "observer": "minmax", "observer_kwargs": {}, "block_structure": None}
PUBLISHED = {
    **{"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"},
    **{"ignore": ["lm_head", "re:.*self_attn.*"], "kv_cache_scheme": None},
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
}


def words(numbers: np.ndarray) -> np.ndarray:
    """int32 [M, D / 8] of numbers from -8 to 7: number d is in bits 4 * (d % 8) of word d // 8, plus 8."""
    bits = (numbers + 8).astype(np.uint32).reshape(len(numbers), -1, 8) << np.arange(0, 32, 4, dtype=np.uint32)
    return np.bitwise_or.reduce(bits, axis=-1).view(np.int32)


def test_numbers_are_packed_as_by_compressed_tensors() -> None:
    packed = np.array([[1985229328, -19088744]], np.int32)  # pack_to_int32(torch.arange(-8, 8), 4) of version 0.20
    np.testing.assert_array_equal(words(np.arange(-8, 8)[None]), packed)
    scales = np.array([[0.5, 2.0]], np.float32)
    expected = np.arange(-8, 8) * np.repeat(scales[0], 8)
    np.testing.assert_array_equal(int4.unpacked(packed, scales), expected[None])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints of the same values: `packed` is a Kimi K2.5, `plain` a DeepSeek-V3 in float32."""
    path = tmp_path_factory.mktemp("saved")
    save_random("deepseek_v3", path / "plain", num_hidden_layers=2, moe_intermediate_size=48)
    shutil.copytree(path / "plain", path / "packed")
    plain, rng = load_file(path / "plain" / "model.safetensors"), np.random.default_rng(0)
    packed = {}
    for name, tensor in plain.items():
        if ".experts." not in name:
            packed[f"language_model.{name}"] = tensor
            continue
        numbers = rng.integers(-8, 8, tensor.shape)
        scales = rng.uniform(0.01, 0.1, (len(numbers), tensor.shape[1] // GROUP)).astype(np.float32)
        plain[name] = numbers.astype(np.float32) * np.repeat(scales, GROUP, axis=1)
        parts = {"packed": words(numbers), "scale": scales, "shape": np.array(tensor.shape, np.int32)}
        packed |= {f"language_model.{name}_{part}": values for part, values in parts.items()}
    packed |= {"vision_tower.encoder.blocks.0.wo.weight": np.ones((2, 2), np.float32)}
    save_file(plain, path / "plain" / "model.safetensors")
    save_file(packed, path / "packed" / "model.safetensors")
    file = path / "packed" / "config.json"
    text = json.loads(file.read_text()) | {"model_type": "kimi_k2", "quantization_config": PUBLISHED}
    config = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    config |= {"vision_config": {"vt_num_hidden_layers": 1}, "media_placeholder_token_id": 3, "ignore_index": -100}
    config |= {"tie_word_embeddings": False, "use_unified_vision_chunk": True, "video_placeholder": "<video>"}
    file.write_text(json.dumps(config | {"auto_map": {"AutoConfig": "configuration.X"}}))
    return path


@pytest.fixture
def packed(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint in INT4, to damage."""
    return Path(shutil.copytree(saved / "packed", tmp_path / "packed"))


@pytest.mark.parametrize(
    ("dtype", "quantised", "piece_bytes"),
    [("float32", None, 1), ("bfloat16", None, 1 << 24), ("float32", "int8", 1 << 11)],
)
def test_int4_weights_equal_dequantised_ones(
    dtype: str, quantised: str | None, piece_bytes: int, saved: Path, monkeypatch
) -> None:
    monkeypatch.setattr(leaf_reading, "_PIECE_BYTES", piece_bytes)
    models = [open_model(str(saved / name)) for name in ("packed", "plain")]
    assert models[0].arch == models[1].arch
    packed, plain = (loaded_leaves(model, (LAST, FINAL_NORM), dtype, quantised=quantised) for model in models)
    assert_same_leaves(packed, plain)
    for model in models:
        model.generation.check_head()


def test_a_language_model_alone_is_read(packed: Path, saved: Path) -> None:
    """Kimi K2 Thinking: no vision, and the quantisation in config.json itself."""
    config, tensors = json.loads((packed / "config.json").read_text()), load_file(packed / "model.safetensors")
    (packed / "config.json").write_text(json.dumps(config["text_config"]))
    tensors = {name.removeprefix("language_model."): tensor for name, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in tensors.items() if "vision" not in name}, packed / "model.safetensors")
    alone, whole = (loaded_leaves(open_model(str(path)), (LAST,)) for path in (packed, saved / "packed"))
    assert_same_leaves(alone, whole)


def of_weights(**changes: object) -> dict:
    return PUBLISHED | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS | changes}}}


REFUSED = {
    "another format": (PUBLISHED | {"format": "float-quantized"}, "format is 'float-quantized'.*Use the checkpoint"),
    "eight bits": (of_weights(num_bits=8), "num_bits is 8"),
    "zero points that are not there": (of_weights(symmetric=False), "weight is missing"),
    "rounded activations": (
        PUBLISHED | {"config_groups": {"group_0": {"weights": WEIGHTS, "input_activations": {"num_bits": 8}}}},
        "sets input_activations=",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_quantisations_are_refused(case: str, packed: Path) -> None:
    quantization, message = REFUSED[case]
    config = json.loads((packed / "config.json").read_text())
    config["text_config"]["quantization_config"] = quantization
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        open_model(str(packed))


NAME = "language_model.model.layers.1.mlp.experts.2.down_proj.weight"
DAMAGES = {
    "no scales": ({f"{NAME}_scale": None}, "2.down_proj.weight is missing.*2.down_proj.weight_packed is unexpected"),
    "scales of other rows": ({f"{NAME}_scale": np.ones((31, 3), np.float32)}, r"I32 with scales F32 \[31, 3\]"),
    "another number of words": ({f"{NAME}_packed": np.ones((32, 3), np.int32)}, r"shape \(32, 24\), expected \(32, 48"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_tensors_that_do_not_fit_are_reported(damage: str, packed: Path) -> None:
    changes, message = DAMAGES[damage]
    file = packed / "model.safetensors"
    tensors = load_file(file) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(CheckpointError, match=message):
        open_model(str(packed))


def along(numbers: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Words of eight 4-bit numbers along an axis: bits 4 * i are number order[i]."""
    parts = np.moveaxis(numbers, axis, -1).astype(np.uint32).reshape(*np.moveaxis(numbers, axis, -1).shape[:-1], -1, 8)
    bits = parts[..., list(order)] << np.arange(0, 32, 4, dtype=np.uint32)
    return np.moveaxis(np.bitwise_or.reduce(bits, axis=-1), -1, axis).view(np.int32)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # `order_map` of AutoAWQ's WQLinear_GEMM
GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}
LLAMAS = {
    "gptq": GPTQ_CONFIG,
    "gptq_v2": GPTQ_CONFIG | {"checkpoint_format": "gptq_v2", "pack_dtype": "int32", "meta": {"uri": "x"}},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    "compressed-tensors": of_weights(symmetric=False),
}


def stored(name: str, method: str, q: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray) -> dict:
    """The parts of a matrix of numbers q [M, D] from 0 to 15, zeros and scales [M, groups], and the inputs' groups."""
    module = name.removesuffix(".weight")
    if method == "compressed-tensors":
        parts = {"packed": along(q, 1), "scale": scales, "shape": np.array(q.shape), "zero_point": along(zeros, 0)}
        return {f"{name}_{part}": values for part, values in parts.items()}
    if method == "awq":
        parts = {"qweight": along(q.T, 1, AWQ_ORDER), "qzeros": along(zeros.T, 1, AWQ_ORDER), "scales": scales.T}
    else:
        offset = method == "gptq"  # which stores zeros minus 1
        parts = {"qweight": along(q.T, 0), "qzeros": along((zeros.T - offset) & 15, 1), "scales": scales.T}
        parts["g_idx"] = groups.astype(np.int32)
    return {f"{module}.{part}": np.ascontiguousarray(values) for part, values in parts.items()}


def save_llama(method: str, path: Path, change: Callable[[dict], dict] = lambda tensors: tensors) -> None:
    """Two checkpoints of the same values: `packed` and `plain`."""
    save_random("llama", path / "plain")
    shutil.copytree(path / "plain", path / "packed")
    plain, packed, rng = load_file(path / "plain" / "model.safetensors"), {}, np.random.default_rng(0)
    for name, tensor in plain.items():
        if "_proj" not in name:
            packed[name] = tensor
            continue
        groups = np.repeat(np.arange(tensor.shape[1] // GROUP), GROUP)
        groups = rng.permutation(groups) if "gptq" in method else groups
        q, zeros = rng.integers(0, 16, tensor.shape), rng.integers(0, 16, (len(tensor), groups.max() + 1))
        scales = rng.uniform(0.01, 0.1, zeros.shape).astype(np.float16)
        plain[name] = (q - zeros[:, groups]).astype(np.float32) * scales[:, groups].astype(np.float32)
        packed |= stored(name, method, q, zeros, scales, groups)
    save_file(plain, path / "plain" / "model.safetensors")
    save_file(change(packed), path / "packed" / "model.safetensors")
    file = path / "packed" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": LLAMAS[method]}))


@pytest.mark.parametrize("method", LLAMAS)
@pytest.mark.parametrize("piece_bytes", [1 << 8, 1 << 24])  # two rows, and all
def test_released_formats_are_read_as_the_values_they_stand_for(
    method: str, piece_bytes: int, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(leaf_reading, "_PIECE_BYTES", piece_bytes)
    save_llama(method, tmp_path)
    packed, plain = (loaded_leaves(open_model(str(tmp_path / name)), (LAST,)) for name in ("packed", "plain"))
    assert_same_leaves(packed, plain)


Q_PROJ = "model.layers.1.self_attn.q_proj"
DAMAGED_LLAMAS = {
    "a group that does not exist": ("gptq", {f"{Q_PROJ}.g_idx": np.full(32, 2, np.int32)}, "g_idx has numbers from 2"),
    "zeros of other outputs": (
        "awq",
        {f"{Q_PROJ}.qzeros": np.ones((2, 5), np.int32)},
        r"\[32, 4\] with I32 \[2, 5",
    ),
    "no zeros": ("awq", {f"{Q_PROJ}.qzeros": None}, "q_proj.weight is missing.*q_proj.qweight is unexpected"),
    "zeros per row": (
        *("compressed-tensors", {f"{Q_PROJ}.weight_zero_point": np.ones((32, 2), np.int32)}),
        r"zeros I32 \[32, 2\]",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED_LLAMAS)
def test_damaged_parts_are_reported(damage: str, tmp_path) -> None:
    method, changes, message = DAMAGED_LLAMAS[damage]
    save_llama(method, tmp_path, lambda tensors: {k: v for k, v in (tensors | changes).items() if v is not None})
    with pytest.raises(CheckpointError, match=message):
        loaded_leaves(open_model(str(tmp_path / "packed")), (LAST,))


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("gptq", {"bits": 8}, "bits is 8"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ("gptq", {"dynamic": {"-:.*": {}}}, "dynamic is"),
        ("awq", {"version": "gemv"}, "version is 'gemv'"),
        ("awq", {"zero_point": False}, "zero_point is False"),
    ],
)
def test_other_variants_are_refused(method: str, change: dict, message: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(LLAMAS, method, LLAMAS[method] | change)
    save_llama(method, tmp_path)
    with pytest.raises(CheckpointError, match=message):
        open_model(str(tmp_path / "packed"))
