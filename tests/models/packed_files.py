"""Pairs of checkpoints with the same values: `packed` in a published format, `plain` in float32."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.models.hf_reference import save_random, torch

safetensors_torch = pytest.importorskip("safetensors.torch")
Fp8Dequantize = pytest.importorskip("transformers.integrations.finegrained_fp8").Fp8Dequantize
convert_moe_packed_tensors = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
GROUP = 16  # 32 inputs are two groups, 48 are three
BLOCK = [16, 12]  # divides only some sizes of the tiny models
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": BLOCK}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False}
WEIGHTS |= {"actorder": None, "observer": "minmax", "observer_kwargs": {}, "block_structure": None}
KIMI = {
    **{"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"},
    **{"ignore": ["lm_head", "re:.*self_attn.*"], "kv_cache_scheme": None},
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # `order_map` of AutoAWQ's WQLinear_GEMM
LLAMAS = {
    "gptq": GPTQ,
    "gptq_v2": GPTQ | {"checkpoint_format": "gptq_v2", "pack_dtype": "int32", "meta": {"uri": "x"}},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
}


def of_weights(**changes: object) -> dict:
    """Kimi's quantisation with other attributes of weights."""
    return KIMI | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS | changes}}}


LLAMAS["compressed-tensors"] = of_weights(symmetric=False)
SCALES = {"deepseek_v3": torch.float32, "qwen3": torch.bfloat16, "qwen3_moe": torch.float16}  # dtypes of FP8's scales
FORMATS = ("mxfp4", *(f"fp8 {family}" for family in SCALES), "kimi", *LLAMAS)
Tensors = dict[str, np.ndarray | torch.Tensor]


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors_torch.load_file(folder / "model.safetensors")


def write_tensors(folder: Path, tensors: Mapping[str, np.ndarray | torch.Tensor]) -> None:
    as_torch = {k: torch.from_numpy(np.array(v)) if isinstance(v, np.ndarray) else v for k, v in tensors.items()}
    safetensors_torch.save_file(
        {name: tensor.contiguous() for name, tensor in as_torch.items()}, folder / "model.safetensors"
    )


def edit_config(folder: Path, **values: object) -> dict:
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))
    return config


def write_pair(name: str, path: Path) -> None:
    """Writes `path`/packed and `path`/plain in the format that FORMATS names."""
    method, _, family = name.partition(" ")
    sizes = {"num_hidden_layers": 2}
    if method == "mxfp4":
        family, sizes = "gpt_oss", sizes | {"hidden_size": 64, "intermediate_size": 96}
    elif method == "kimi":
        family, sizes = "deepseek_v3", sizes | {"moe_intermediate_size": 48}
    save_random(family or "llama", path / "plain", **sizes)
    shutil.copytree(path / "plain", path / "packed")
    plain, packed, rng = read_tensors(path / "plain"), {}, np.random.default_rng(0)
    for tensor_name, tensor in plain.items():
        parts = _parts(method, family, tensor_name, tensor, rng)
        packed |= {tensor_name: tensor} if parts is None else parts[1]
        plain[tensor_name] = tensor if parts is None else parts[0]
    assert len(packed) > len(plain)
    write_tensors(path / "plain", plain)
    quantization = {"mxfp4": MXFP4, "fp8": FP8, "kimi": KIMI, **LLAMAS}[method]
    if method != "kimi":
        edit_config(path / "packed", quantization_config=quantization)
        write_tensors(path / "packed", packed)
        return
    packed = {f"language_model.{tensor_name}": tensor for tensor_name, tensor in packed.items()}
    write_tensors(path / "packed", packed | {"vision_tower.encoder.blocks.0.wo.weight": np.ones((2, 2), np.float32)})
    text = edit_config(path / "packed", model_type="kimi_k2", quantization_config=quantization)
    config = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    config |= {"vision_config": {"vt_num_hidden_layers": 1}, "media_placeholder_token_id": 3, "ignore_index": -100}
    config |= {"tie_word_embeddings": False, "use_unified_vision_chunk": True, "video_placeholder": "<video>"}
    (path / "packed/config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "configuration.X"}}))


def _parts(
    method: str, family: str, name: str, tensor: torch.Tensor, rng: np.random.Generator
) -> tuple[np.ndarray | torch.Tensor, Tensors] | None:
    """New values of a matrix, and the tensors that hold them; None for tensors that the format does not pack."""
    if method == "mxfp4":
        return _mxfp4(name, tensor, rng) if name.endswith(("gate_up_proj", "down_proj")) else None
    if method == "fp8":
        is_packed = name.endswith(("_proj.weight", "_with_mqa.weight"))
        return _fp8(name, tensor, rng, SCALES[family]) if is_packed else None
    if method == "kimi":
        return _kimi(name, tensor, rng) if ".experts." in name else None
    return _llama(name, tensor, rng, method) if "_proj" in name else None


def _mxfp4(name: str, tensor: torch.Tensor, rng: np.random.Generator) -> tuple[torch.Tensor, Tensors]:
    experts, inputs, outputs = tensor.shape
    blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
    scales = rng.integers(118, 124, blocks.shape[:3], dtype=np.uint8)
    scales[0, 0, 0], scales[0, 1, 0] = 0, 252
    numbers = convert_moe_packed_tensors(*map(torch.from_numpy, (blocks, scales)), dtype=torch.float32)
    return numbers, {f"{name}_blocks": blocks, f"{name}_scales": scales}


def _fp8(name: str, tensor: torch.Tensor, rng: np.random.Generator, dtype: torch.dtype) -> tuple[torch.Tensor, Tensors]:
    bits = rng.integers(0, 255, tensor.shape, dtype=np.uint8)
    numbers = torch.from_numpy(np.where(bits == 127, 126, bits)).view(torch.float8_e4m3fn)  # 127 and 255 are NaN
    blocks = [-(-size // part) for size, part in zip(numbers.shape, BLOCK, strict=True)]
    scales = torch.from_numpy(rng.random(blocks) * 1e-3).to(dtype)
    spread = scales.float().repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    values = numbers.float() * spread[: numbers.shape[0], : numbers.shape[1]]  # the formula of the model's own code
    if not any(size % part for size, part in zip(numbers.shape, BLOCK, strict=True)):  # as transformers needs
        np.testing.assert_array_equal(Fp8Dequantize(None)._dequantize_one(numbers, scales, torch.float32), values)
    return values, {name: numbers, f"{name}_scale_inv": scales}


def along(numbers: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """int32 words of eight 4-bit numbers along an axis: bits 4 * i are number order[i]."""
    moved = np.moveaxis(numbers, axis, -1).astype(np.uint32)
    bits = moved.reshape(*moved.shape[:-1], -1, 8)[..., list(order)] << np.arange(0, 32, 4, dtype=np.uint32)
    return np.moveaxis(np.bitwise_or.reduce(bits, axis=-1), -1, axis).view(np.int32)


def _kimi(name: str, tensor: torch.Tensor, rng: np.random.Generator) -> tuple[np.ndarray, Tensors]:
    numbers = rng.integers(-8, 8, tensor.shape)
    scales = rng.uniform(0.01, 0.1, (len(numbers), tensor.shape[1] // GROUP)).astype(np.float32)
    parts = {"packed": along(numbers + 8, 1), "scale": scales, "shape": np.array(tensor.shape, np.int32)}
    values = numbers.astype(np.float32) * np.repeat(scales, GROUP, axis=1)
    return values, {f"{name}_{part}": content for part, content in parts.items()}


def _llama(name: str, tensor: torch.Tensor, rng: np.random.Generator, method: str) -> tuple[np.ndarray, Tensors]:
    """Numbers q from 0 to 15, with zeros and scales for each row and group of inputs."""
    groups = np.repeat(np.arange(tensor.shape[1] // GROUP), GROUP)
    groups = rng.permutation(groups) if "gptq" in method else groups
    q, zeros = rng.integers(0, 16, tensor.shape), rng.integers(0, 16, (len(tensor), groups.max() + 1))
    scales = rng.uniform(0.01, 0.1, zeros.shape).astype(np.float16)
    values = (q - zeros[:, groups]).astype(np.float32) * scales[:, groups].astype(np.float32)
    if method == "compressed-tensors":
        parts = {"packed": along(q, 1), "scale": scales, "shape": np.array(q.shape), "zero_point": along(zeros, 0)}
        return values, {f"{name}_{part}": content for part, content in parts.items()}
    if method == "awq":
        parts = {"qweight": along(q.T, 1, AWQ_ORDER), "qzeros": along(zeros.T, 1, AWQ_ORDER), "scales": scales.T}
    else:
        offset = method == "gptq"  # which stores zeros minus 1
        parts = {"qweight": along(q.T, 0), "qzeros": along((zeros.T - offset) & 15, 1), "scales": scales.T}
        parts["g_idx"] = groups.astype(np.int32)
    return values, {f"{name.removesuffix('.weight')}.{part}": content for part, content in parts.items()}
