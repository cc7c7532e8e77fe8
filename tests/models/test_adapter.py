"""Models with a LoRA adapter against the merged checkpoint: the formula W + scale * B A, applied to the file's tensors.

The parity tests compare models with transformers, so equal leaves are enough here.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline import Extractor
from pipeline.core.errors import CheckpointError, ConfigError
from pipeline.core.sites import FINAL_NORM, ActivationKey, Site
from pipeline.models.checkpoints.leaf_reading import read_leaf
from pipeline.models.registry import Model, open_model
from tests.models.adapter_files import ADAPTER, write_adapter
from tests.models.hf_reference import save_random
from tests.models.loaded_leaves import DEVICE, loaded_leaves

LAYER = "model.layers.1"
Q, DOWN, UP = (f"{LAYER}.{name}_proj" for name in ("self_attn.q", "mlp.down", "mlp.up"))
EXPERT = f"{LAYER}.mlp.experts.3.gate_proj"
GPT2, NEOX = "transformer.h.1.attn.c_attn", "gpt_neox.layers.1.attention.query_key_value"
PATTERNS = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers.\d.mlp.(up|gate)_proj": 5, "proj": 99}}

# Family, module -> rank and scale, names of tensors that are replaced, settings.
CASES = {
    "alpha / rank": ("llama", {Q: (4, 4.0), DOWN: (4, 4.0)}, (), {"lora_alpha": 16}),
    "patterns": ("llama", {Q: (2, 4.0), UP: (4, 1.25), DOWN: (4, 2.0)}, (), PATTERNS),
    "root of the rank": ("qwen2", {Q: (4, 4.0)}, (), {"use_rslora": True}),
    "inputs first": ("gpt2", {GPT2: (4, 2.0), "transformer.h.1.mlp.c_fc": (4, 2.0)}, (), {"fan_in_fan_out": True}),
    "queries, keys and values in one": ("phi3", {f"{LAYER}.self_attn.qkv_proj": (4, 2.0)}, (), {}),
    "gate and up in one, without a trunk": ("phi3", {"layers.0.mlp.gate_up_proj": (4, 2.0)}, (), {}),
    "head by head": ("gpt_neox", {NEOX: (4, 2.0)}, (f"{NEOX}.base_layer.bias",), {"bias": "all"}),
    "an expert": ("qwen3_moe", {EXPERT: (4, 2.0)}, (), {}),
    "embedding and head": ("llama", {"model.embed_tokens": (4, 2.0), "lm_head": (4, 2.0)}, (), {}),
    "rows with norms": ("qwen2", {Q: (4, 2.0)}, (), {"use_dora": True}),
    "whole modules": ("llama", {}, ("model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"), {}),
    "other modalities": (
        "llama",
        {Q: (4, 2.0)}
        | {f"model.{name}": (4, 2.0) for name in ("visual.blocks.0.qkv", "vision_model.layers.0.q", "mm_projector.0")},
        (),
        {},
    ),
    "a head in a language model": ("mistral3", {"language_model.lm_head": (4, 2.0)}, (), {}),
    "a whole head in a language model": ("mistral3", {}, ("language_model.lm_head.weight",), {}),
    "a whole head with a bias": ("phi", {}, ("lm_head.weight", "lm_head.bias"), {}),
}


def make_case(case: str, path: Path) -> tuple[Model, Model]:
    """A model with an adapter, and the merged model."""
    family, modules, replaced, settings = CASES[case]
    untied = {"tie_word_embeddings": False} if family == "mistral3" else {}
    save_random(family, path / "base", num_hidden_layers=2, **untied)
    tensors, rng, adapter = load_file(path / "base" / "model.safetensors"), np.random.default_rng(0), {}
    for module, (rank, scale) in modules.items():
        name = next((name for name in tensors if name.endswith(f"{module}.weight")), None)
        inputs_first = family == "gpt2" or "embed" in module
        shape = (9, 9) if name is None else tensors[name].shape[:: -1 if inputs_first else 1]
        a, b = rng.normal(0, 0.3, (rank, shape[1])), rng.normal(0, 0.3, (shape[0], rank))
        kind = "lora_embedding_{}" if "embed" in module else "lora_{}.weight"
        adapter |= {f"{module}.{kind.format(x)}": value.astype(np.float32) for x, value in (("A", a), ("B", b))}
        if name is None:
            continue
        merged = tensors[name] + scale * (b @ a).T if inputs_first else tensors[name] + scale * (b @ a)
        if settings.get("use_dora"):
            norms = rng.uniform(1, 2, shape[0])
            adapter[f"{module}.lora_magnitude_vector"] = norms.astype(np.float32)
            merged *= (norms / np.linalg.norm(merged, axis=1))[:, None]
        tensors[name] = merged.astype(np.float32)
    for name in replaced:
        stored = name.replace(".base_layer", "")
        adapter[name] = tensors[stored] = rng.normal(0, 1, tensors[stored].shape).astype(np.float32)
    (path / "merged").mkdir()
    save_file(tensors, path / "merged" / "model.safetensors")
    (path / "merged" / "config.json").write_text((path / "base" / "config.json").read_text())
    address = write_adapter(path / "adapter", adapter, **settings)
    return open_model(str(path / "base"), adapter=address), open_model(str(path / "merged"))


def keys(model: Model) -> tuple[ActivationKey, ...]:
    return ActivationKey(model.num_layers - 1, Site.resid_post), FINAL_NORM


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_gives_the_merged_weights(case: str, tmp_path: Path) -> None:
    model, merged = make_case(case, tmp_path)
    got, expected = loaded_leaves(model, keys(model)), loaded_leaves(merged, keys(merged))
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-5, atol=1e-6, err_msg=name)
    heads = [m.load(keys(m), "float32", DEVICE, with_head=True) for m in (model, merged)]
    for name in {"head", "head_bias"} & heads[1].keys():
        np.testing.assert_allclose(heads[0][name], heads[1][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["alpha / rank", "inputs first", "rows with norms"])
def test_devices_read_parts_of_merged_weights_and_int8_is_rounded_after_the_merge(case: str, tmp_path: Path) -> None:
    model, merged = make_case(case, tmp_path)
    blocks = model.leaves(keys(model))["runs"][0]["attention"]
    leaf = blocks["qkv" if "qkv" in blocks else "q"]
    index = (slice(1, 2), slice(1, 2), *[slice(None)] * (len(leaf.shape) - 3), slice(3, 7))
    everything = (slice(None),) * len(leaf.shape)
    part, whole = (
        read_leaf(model.checkpoint, leaf, np.dtype(np.float32), [each])[0][0] for each in (index, everything)
    )
    np.testing.assert_array_equal(part, whole[index])
    got, expected = (loaded_leaves(m, keys(m), quantised="int8") for m in (model, merged))
    for name, values in expected.items():
        assert np.abs(got[name] - values.astype(np.float32)).max() <= (1 if values.dtype == np.int8 else 1e-5)


@pytest.fixture
def base(tmp_path: Path) -> str:
    save_random("llama", tmp_path / "base", num_hidden_layers=2, tie_word_embeddings=True)
    return str(tmp_path / "base")


def factors(module: str = Q, rank: int = 4) -> dict[str, np.ndarray]:
    zeros = np.zeros((rank, 32), np.float32)
    return {f"{module}.lora_A.weight": zeros, f"{module}.lora_B.weight": zeros.T}


REFUSED = {
    "another model": (factors("model.layers.7.self_attn.q_proj"), {}, "layers.7.* belongs to no tensor .*owner/Base"),
    "other modalities only": (factors("model.visual.blocks.0.qkv"), {}, "changes no tensor"),
    "another rank": (factors(rank=3), {}, r"lora_A.weight has shape \(3, 32\), expected \(4, 32\)"),
    "more tokens": ({"model.embed_tokens.weight": np.zeros((200, 32), np.float32)}, {}, r"\(200, 32\), expected \(199"),
    "bias": (factors() | {f"{Q}.lora_B.bias": np.zeros(32, np.float32)}, {}, "lora_B.bias belongs to no tensor"),
    "two for one tensor": (factors() | factors(Q.removeprefix("model.")), {}, "is for the same tensor as"),
    "other methods": (factors(), {"peft_type": "IA3"}, "peft_type is 'IA3', which is not implemented.*merge"),
    "changed base weights": (factors(), {"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    "parameters": (factors(), {"target_parameters": ["mlp.experts"]}, "sets target_parameters=.*merge this one"),
    "pattern": (factors(), {"alpha_pattern": {"(": 1}}, "not a regular expression"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_adapter_that_does_not_fit_is_refused(case: str, base: str, tmp_path: Path) -> None:
    tensors, settings, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=re.compile(message, re.DOTALL)) as error:
        open_model(base, adapter=write_adapter(tmp_path / "adapter", tensors, **settings))
    assert str(tmp_path / "adapter") in str(error.value)


def test_a_head_that_the_adapter_separates_from_the_embedding_is_refused(base: str, tmp_path: Path) -> None:
    for number, name in enumerate(("model.embed_tokens.weight", "lm_head.weight")):
        address = write_adapter(tmp_path / f"{number}", {name: np.ones((199, 32), np.float32)})
        model = open_model(base, adapter=address)
        model.leaves(keys(model))
        with pytest.raises(CheckpointError, match="one tensor in the base model"):
            model.leaves(keys(model), with_head=True)


def test_an_adapter_is_refused_with_random_weights(base: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.adapter is set.*model.init=random"):
        open_model(base, init="random", adapter=write_adapter(tmp_path / "adapter", factors()))


def test_the_identity_contains_the_adapter(base: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    address = write_adapter(tmp_path / "adapter", factors())
    plain, adapted = open_model(base).identity(), open_model(base, adapter=address).identity()
    assert "owner/Base" not in caplog.text  # the folder's name is that of the base model
    assert adapted | {"adapter": None} == plain | {"adapter": None}
    write_adapter(tmp_path / "adapter", factors(), lora_alpha=9, base_model_name_or_path="owner/Other")
    assert open_model(base, adapter=address).identity()["adapter"] != adapted["adapter"]
    assert "is for 'owner/Other'" in caplog.text


def test_missing_files_are_named(base: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model.adapter is .*expected a folder"):
        open_model(base, adapter=str(tmp_path / "none"))
    address = write_adapter(tmp_path / "adapter", factors())
    (tmp_path / "adapter" / ADAPTER).rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"has no adapter_model.safetensors, got .*\.bin.*save_pretrained"):
        open_model(base, adapter=address)
    with pytest.raises(CheckpointError, match=r"is a PEFT adapter.*Set model.adapter .*'owner/Base'"):
        open_model(address)


@pytest.mark.heavy
def test_an_extractor_takes_an_adapter(tmp_path: Path) -> None:
    make_case("alpha / rank", tmp_path)
    options = {"tokenizer": "${assets:tiny-qwen2}", "model_dtype": "float32", "dtype": "float32", "progress": False}
    folders = {name: str(tmp_path / name) for name in ("base", "merged", "adapter")}
    adapted = Extractor(folders["base"], 1, adapter=folders["adapter"], **options)
    plain, merged = (Extractor(folders[name], 1, **options) for name in ("base", "merged"))
    outputs = [extractor(["a"])[0].activations["blocks.1.resid_post"] for extractor in (adapted, merged, plain)]
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)
    assert not np.allclose(outputs[0], outputs[2], atol=0.1)
