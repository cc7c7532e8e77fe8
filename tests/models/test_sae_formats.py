"""SAEs and transcoders in each published format: features follow its definition, and anything unknown is refused."""

import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import fsspec
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline.core.errors import CheckpointError, PipelineError
from pipeline.models.sae.formats import saelens
from pipeline.models.sae.loading import open_sae
from pipeline.models.sae.spec import ARRAYS
from tests.hub import contents, hub_for_this_process
from tests.models import sae_files
from tests.models.sae_files import D_IN, D_OUT, WIDTH, K, Written, decode_dense, encode_dense, normal

Tensors = Mapping[str, np.ndarray]
Config = Mapping[str, object]
Write = Callable[[Path, np.random.Generator], Written]
Features = Callable[[Tensors, Config, np.ndarray], np.ndarray]


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def largest(pre: np.ndarray, k: int) -> np.ndarray:
    """The k largest of each row, and 0 for the others."""
    values = np.zeros_like(pre)
    order = np.argsort(pre, axis=-1)[:, -k:]
    np.put_along_axis(values, order, np.take_along_axis(pre, order, axis=-1), axis=-1)
    return values


def lens_input(t: Tensors, config: Config, x: np.ndarray) -> np.ndarray:
    """SAELens' `process_sae_in`."""
    if config["normalize_activations"] == "constant_norm_rescale":
        x = x * config["d_in"] ** 0.5 / np.sqrt((x**2).sum(axis=-1, keepdims=True))
    if config["normalize_activations"] == "layer_norm":
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / (np.sqrt((x**2).sum(axis=-1, keepdims=True) / (x.shape[-1] - 1)) + 1e-5)
    return x - t["b_dec"] if config["apply_b_dec_to_input"] else x


def lens_relu(t: Tensors, config: Config, x: np.ndarray) -> np.ndarray:
    return relu(lens_input(t, config, x) @ t["W_enc"] + t["b_enc"])


def lens_jumprelu(t: Tensors, config: Config, x: np.ndarray) -> np.ndarray:
    pre = lens_input(t, config, x) @ t["W_enc"] + t["b_enc"]
    return relu(pre) * (pre > t["threshold"])


def lens_topk(t: Tensors, config: Config, x: np.ndarray) -> np.ndarray:
    pre = lens_input(t, config, x) @ t["W_enc"] + t["b_enc"]
    if config.get("rescale_acts_by_decoder_norm"):
        pre = pre * np.sqrt((t["W_dec"] ** 2).sum(axis=-1))
    return relu(largest(pre, K))


def lens_gated(t: Tensors, config: Config, x: np.ndarray) -> np.ndarray:
    x = lens_input(t, config, x)
    return (x @ t["W_enc"] + t["b_gate"] > 0) * relu(x @ (t["W_enc"] * np.exp(t["r_mag"])) + t["b_mag"])


def gemma(t: Tensors, config: Config, x: np.ndarray) -> np.ndarray:
    t = {name.lower(): values for name, values in t.items()}
    pre = x @ t["w_enc"] + t["b_enc"]
    return (pre > t["threshold"]) * relu(pre)


def sparsify(t: Tensors, config: Config, x: np.ndarray) -> np.ndarray:
    x = x if config["transcode"] else x - t["b_dec"]
    return largest(relu(x @ t["encoder.weight"].T + t["encoder.bias"]), K)


def compared(t: Tensors, config: Config, pre: np.ndarray) -> np.ndarray:
    """What Llama Scope's thresholds apply to."""
    return pre * np.linalg.norm(t["decoder.weight"], axis=0) if config["sparsity_include_decoder_norm"] else pre


def llama_scope(t: Tensors, config: Config, x: np.ndarray) -> np.ndarray:
    """Inputs are scaled to a mean norm of sqrt(d); the threshold applies to features divided by the same factor."""
    factor = D_IN**0.5 / config["dataset_average_activation_norm"]["in"]
    pre = (x * factor) @ t["encoder.weight"].T + t["encoder.bias"]
    return relu(pre) * (compared(t, config, pre) / factor > config["jump_relu_threshold"])


def llama_scope_r1(t: Tensors, config: Config, x: np.ndarray) -> np.ndarray:
    """The threshold applies to the scaled input's features."""
    factor = D_IN**0.5 / t["dataset_average_activation_norm.blocks.15.hook_resid_mid"]
    pre = (x * factor) @ t["encoder.weight"].T + t["encoder.bias"]
    return relu(pre) * (compared(t, config, pre) > np.exp(t["log_jumprelu_threshold"]))


def circuit_tracer(t: Tensors, config: Config, x: np.ndarray) -> np.ndarray:
    pre = x @ t["W_enc"].T + t["b_enc"]
    return relu(pre) * (pre > t.get("activation_function.threshold", 0))


def gemma_embedding(t: Tensors, config: Config, x: np.ndarray) -> np.ndarray:
    return gemma(t, config, x / D_IN**0.5)


def centred(t: Tensors, config: Config, x: np.ndarray) -> np.ndarray:
    return lens_relu(t, config, x - x.mean(axis=-1, keepdims=True))


def lens(architecture: str, /, **config: object) -> Write:
    return lambda folder, rng: sae_files.write_saelens(folder, architecture, rng, **config)


SPARSIFY, GEMMA, LLAMA = sae_files.write_sparsify, sae_files.write_gemma_scope, sae_files.write_llama_scope
# From attributes to a writer of a format with these attributes.
llama, llama_r1 = partial(partial, LLAMA), partial(partial, sae_files.write_llama_scope_r1)
sparse, gemma_2 = partial(partial, SPARSIFY), partial(partial, sae_files.write_gemma_scope_2)


def lens_scaled(folder: Path, rng: np.random.Generator) -> Written:
    """A checkpoint during training, with the factor of activations in another file."""
    written = sae_files.write_saelens(folder, "gated", rng, normalize_activations="expected_average_only_in")
    sae_files.write_json(folder / "activation_scaler.json", {"scaling_factor": 0.4, "has_whitening": False})
    return written


CENTRED = {"model_from_pretrained_kwargs": {"center_writing_weights": True}}
HOOK_Z = {"metadata": {"hook_name": "blocks.1.attn.hook_z"}, "reshape_activations": "hook_z"}
CASES: dict[str, tuple[Write, Features]] = {
    "standard": (lens("standard"), lens_relu),
    "standard, old": (lens("standard", is_old=True), lens_relu),
    "standard, raw input": (lens("standard", apply_b_dec_to_input=False), lens_relu),
    "standard, constant norm": (lens("standard", normalize_activations="constant_norm_rescale"), lens_relu),
    "standard, layer norm": (lens("standard", normalize_activations="layer_norm"), lens_relu),
    "standard, hook_z": (lens("standard", **HOOK_Z), lens_relu),
    "standard, old hook_z": (lens("standard", is_old=True, hook_name="blocks.1.attn.hook_z"), lens_relu),
    "standard, centred": (lens("standard", **CENTRED), centred),
    "gated": (lens("gated"), lens_gated),
    "gated, scaled input": (lens_scaled, lambda t, config, x: lens_gated(t, config, x * 0.4)),
    "jumprelu": (lens("jumprelu"), lens_jumprelu),
    "topk": (lens("topk"), lens_topk),
    "topk, old": (lens("topk", is_old=True), lens_topk),
    "topk, decoder norms": (lens("topk", rescale_acts_by_decoder_norm=True), lens_topk),
    "transcoder": (lens("transcoder"), lens_relu),
    "skip_transcoder": (lens("skip_transcoder"), lens_relu),
    "jumprelu_skip_transcoder": (lens("jumprelu_skip_transcoder"), lens_jumprelu),
    "gemma_scope": (sae_files.write_gemma_scope, gemma),
    "gemma_scope, embedding": (
        lambda folder, rng: sae_files.write_gemma_scope(folder / "embedding" / "width_4k", rng),
        gemma_embedding,
    ),
    "gemma_scope_2": (sae_files.write_gemma_scope_2, gemma),
    "gemma_scope_2, transcoder": (
        gemma_2(kind="transcoder"),
        gemma,
    ),
    "sparsify": (sae_files.write_sparsify, sparsify),
    "sparsify, skip transcoder": (
        sparse(transcode=True, skip_connection=True),
        sparsify,
    ),
    "llama_scope": (sae_files.write_llama_scope, llama_scope),
    "llama_scope, transcoder": (
        llama(hook_out="blocks.24.hook_mlp_out"),
        llama_scope,
    ),
    "llama_scope, norms": (llama(has_norms=True), llama_scope),
    "llama_scope_r1, transcoder": (llama_r1(), llama_scope_r1),
    "llama_scope_r1, transcoder without norms": (llama_r1(sparsity_include_decoder_norm=False), llama_scope_r1),
    "circuit_tracer, transcoder": (sae_files.write_circuit_tracer, circuit_tracer),
    "circuit_tracer, skip transcoder": (
        partial(sae_files.write_circuit_tracer, has_skip=True),
        circuit_tracer,
    ),
}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def tokens(rng: np.random.Generator, num: int = 200) -> np.ndarray:
    """Activations [num, D] whose mean is not 0."""
    return normal(rng, num, D_IN, scale=2.0) + np.float32(0.3)


def in_float64(tensors: Tensors) -> dict[str, np.ndarray]:
    return {name: values.astype(np.float64) for name, values in tensors.items()}


def reconstruction(case: str, written: Written, values: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The output of the format's decoder."""
    t, config = in_float64(written.tensors), written.config
    if case.startswith("llama_scope"):
        norm = t.get("dataset_average_activation_norm.blocks.15.hook_mlp_out")
        factor = D_IN**0.5 / (config["dataset_average_activation_norm"]["out"] if norm is None else norm)
        return (values @ t["decoder.weight"].T + t["decoder.bias"]) / factor
    decoder, bias = t.get("W_dec", t.get("w_dec")), t["b_dec"]
    if config.get("rescale_acts_by_decoder_norm"):
        values = values / np.sqrt((decoder**2).sum(axis=-1))
    out = values @ decoder + bias
    if case == "gemma_scope, embedding":
        return out * D_IN**0.5
    if case == "standard, centred":
        return out + x.mean(axis=-1, keepdims=True)
    if case == "gated, scaled input":
        return out / 0.4
    if case == "standard, constant norm":
        return out * np.sqrt((x**2).sum(axis=-1, keepdims=True)) / D_IN**0.5
    if case == "standard, layer norm":
        return out * x.std(axis=-1, ddof=1, keepdims=True) + x.mean(axis=-1, keepdims=True)
    if "W_skip" in t:
        return out + x @ t["W_skip"].T
    return out + (x @ t["affine_skip_connection"] if "affine_skip_connection" in t else 0)


@pytest.mark.parametrize("case", CASES)
def test_an_sae_follows_its_formats_definition(case: str, tmp_path: Path, rng):
    write, features = CASES[case]
    written = write(tmp_path / "sae", rng)
    sae, x = open_sae(str(written.folder)), tokens(rng)
    arrays = sae.arrays()
    assert sae.shapes == {name: values.shape for name, values in arrays.items()}  # known before arrays are read
    assert arrays.keys() <= ARRAYS.keys()
    assert all(values.dtype == np.float32 and values.flags.c_contiguous for values in arrays.values())
    expected = features(in_float64(written.tensors), written.config, x.astype(np.float64))
    values = encode_dense(sae, x)
    assert (sae.spec.d_in, sae.spec.width) == (D_IN, WIDTH)
    assert 0 < np.count_nonzero(values) < values.size * 0.6
    np.testing.assert_array_equal(values > 0, expected > 0)
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)
    out, is_transcoder = decode_dense(sae, values, x), "transcoder" in case
    expected = reconstruction(case, written, values, x.astype(np.float64))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert sae.spec.is_transcoder is (None if sae.format == "gemma_scope" else is_transcoder)
    assert sae.spec.d_out == (
        D_OUT if is_transcoder and sae.format in ("saelens", "gemma_scope_2", "circuit_tracer") else D_IN
    )


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_arrays_keep_the_dtype_of_the_file(dtype: type, tmp_path: Path, rng):
    written = sae_files.write_saelens(tmp_path, "topk", rng, rescale_acts_by_decoder_norm=True)
    tensors = {name: values.astype(dtype) for name, values in written.tensors.items()}
    save_file(tensors, tmp_path / saelens.WEIGHTS)
    arrays = open_sae(str(tmp_path)).arrays()
    np.testing.assert_array_equal(arrays["w_enc"], tensors["W_enc"])
    assert {name: values.dtype for name, values in arrays.items()} == {
        **dict.fromkeys(("w_enc", "b_enc", "w_dec", "b_out", "b_in"), np.dtype(dtype)),
        "feature_scale": np.dtype(np.float32),  # computed
    }


@pytest.mark.parametrize(
    ("case", "hook_name", "name"),
    [
        ("standard", "blocks.1.hook_resid_post", "saelens"),
        ("standard, old", "blocks.1.hook_resid_post", "saelens"),
        ("gemma_scope", None, "gemma_scope"),
        ("gemma_scope_2", "blocks.12.hook_resid_post", "gemma_scope_2"),
        ("gemma_scope, embedding", "hook_embed", "gemma_scope"),
        ("circuit_tracer, transcoder", "blocks.7.hook_resid_mid", "circuit_tracer"),
        ("sparsify", None, "sparsify"),
        ("llama_scope", "blocks.24.hook_resid_post", "llama_scope"),
    ],
)
def test_formats_and_hook_names_are_read(case: str, hook_name: str | None, name: str, tmp_path: Path, rng):
    sae = open_sae(str(CASES[case][0](tmp_path / "sae", rng).folder))
    assert (sae.hook_name, sae.format) == (hook_name, name)


def gemma_2_alone(folder: Path, rng: np.random.Generator) -> Written:
    written = sae_files.write_gemma_scope_2(folder, rng, kind="transcoder" if "transcoder" in str(folder) else "sae")
    (folder / "config.json").unlink()
    return written


def cross_layer_2(folder: Path, rng: np.random.Generator) -> Written:
    written = gemma_2_alone(folder, rng)
    decoder = normal(rng, WIDTH, 3, D_IN)
    save_file({**written.tensors, "w_dec": decoder}, folder / "params_layer_3.safetensors")
    return Written(folder / "params_layer_3.safetensors", {}, written.tensors)


def tracer_alone(folder: Path, rng: np.random.Generator) -> Written:
    written = sae_files.write_circuit_tracer(folder, rng)
    (folder / "config.yaml").unlink()
    return written


def cross_layer(config: str) -> Write:
    def write(folder: Path, rng: np.random.Generator) -> Written:
        written = sae_files.write_cross_layer(folder, rng)
        (folder / "config.yaml").write_bytes(config.encode())
        return written

    return write


@pytest.mark.parametrize(
    ("folder", "write", "hook_name", "model_name", "is_transcoder"),
    [
        (
            *("gemma-scope-9b-it-res/layer_20/width_131k/average_l0_13", GEMMA),
            *("blocks.20.hook_resid_post", "google/gemma-2-9b-it", False),
        ),
        (
            *("models--google--gemma-scope-2b-pt-att/snapshots/0/layer_0/width_16k/x", GEMMA),
            *("blocks.0.attn.hook_z", "google/gemma-2-2b", False),
        ),
        (
            *("gemma-scope-2b-pt-transcoders/layer_3/width_16k/average_l0_54", GEMMA),
            *("blocks.3.ln2.hook_normalized", "google/gemma-2-2b", True),
        ),
        (
            *("gemma-scope-2-270m-pt/attn_out_all/layer_5_width_16k_l0_big", gemma_2_alone),
            *("blocks.5.attn.hook_z", "google/gemma-3-270m", False),
        ),
        (
            *("gemma-scope-2-4b-it/transcoder/layer_17_width_16k_l0_big_affine", gemma_2_alone),
            *("blocks.17.mlp.hook_in", "google/gemma-3-4b-it", True),
        ),
        (
            *("gemma-scope-2-1b-it/clt/width_262k_l0_big_affine", cross_layer_2),
            *("blocks.3.mlp.hook_in", "google/gemma-3-1b-it", True),
        ),
        (
            *("anywhere", gemma_2(model_name="google/gemma-3-4b-pt", hf_hook_point_in="model.layers.9.output")),
            *("blocks.9.hook_resid_post", "google/gemma-3-4b-pt", False),
        ),
        (
            *("qwen3-14b-transcoders-lowl0", tracer_alone),
            *("blocks.7.mlp.hook_in", "Qwen/Qwen3-14B", True),
        ),
        (
            *("models--mwhanna--qwen3-14b-transcoders/snapshots/0", tracer_alone),
            *("blocks.7.mlp.hook_in", "Qwen/Qwen3-14B", True),
        ),
        ("clt", cross_layer("model_name: owner/tiny\nscan: [a, b]\nactivation: null"), None, "owner/tiny", True),
        ("clt", cross_layer("feature_input_hook: hook_resid_mid"), "blocks.7.hook_resid_mid", None, True),
        ("layers.7", sae_files.write_sparsify, "blocks.7.hook_resid_post", None, False),
        ("layers.7.mlp", sae_files.write_sparsify, "blocks.7.mlp.hook_out", None, False),
        ("layers.7.self_attn", sae_files.write_sparsify, "blocks.7.attn.hook_out", None, False),
        ("layers.7.other", sae_files.write_sparsify, None, None, False),
        ("h.7.mlp", sparse(transcode=True), "blocks.7.mlp.hook_in", None, True),
        ("gemma-scope-2b-pt-res/embedding", GEMMA, "hook_embed", "google/gemma-2-2b", False),
        ("embedding/sae", GEMMA, None, None, None),
        (
            *("embedding/gemma-scope-2b-pt-res/layer_0/width_4k", GEMMA),
            *("blocks.0.hook_resid_post", "google/gemma-2-2b", False),
        ),
        (
            *("module", gemma_2(hf_hook_point_in="model.layers.9.mlp.gate_proj.output")),
            *(None, "google/gemma-3-1b-pt", False),
        ),
    ],
)
def test_names_say_what_files_do_not(folder, write, hook_name, model_name, is_transcoder, tmp_path: Path, rng):
    sae = open_sae(str(write(tmp_path / folder, rng).folder))
    assert (sae.hook_name, sae.context.model_name, sae.spec.is_transcoder) == (hook_name, model_name, is_transcoder)
    assert {"w_enc", "b_enc"} <= sae.arrays().keys()


def test_values_do_not_depend_on_how_the_address_is_written(tmp_path: Path, rng, monkeypatch):
    """Names of folders above the working directory count."""
    gemma = tmp_path / "gemma-scope-2b-pt-res" / "embedding" / "width_4k"
    sae_files.write_gemma_scope(gemma, rng)
    old = dict(is_old=True, hook_name="blocks.8.hook_resid_pre")
    lens = tmp_path / "jbloom" / "GPT2-Small-SAEs-Reformatted" / "x"
    sae_files.write_saelens(lens, "standard", rng, **old)
    for folder in (gemma, lens):
        expected = open_sae(str(folder))
        monkeypatch.chdir(folder)
        for address in (".", f"../{folder.name}"):
            sae = open_sae(address)
            assert (sae.identity, sae.hook_name) == (expected.identity, expected.hook_name)


@pytest.mark.parametrize(
    "config",
    [
        "model_name: 7",
        "---\n# a comment\nmodel_name:  '7' # another\r\nfeature_input_hook: null\n",
        'activation: ~\nmodel_name: "7"\nscan:\n- a: b\n  c: [d]\nurls:\n  - hf://a\nfeature_input_hook:',
        "scan: &a [*a, !x {b: c}]\nmodel_name: 7\nother: |\n  model_name: 8",
        "\ufeffmodel_name:\t7",
    ],
)
def test_some_keys_of_yaml_are_read(config: str, tmp_path: Path, rng):
    sae = open_sae(str(cross_layer(config)(tmp_path, rng).folder))
    assert (sae.context.model_name, sae.hook_name) == ("7", None)


def test_the_registry_of_saelens_adds_to_its_files(tmp_path: Path, rng):
    """Factors, scaling and centring that only pretrained_saes.yaml has."""
    old = dict(is_old=True, normalize_activations="expected_average_only_in", hook_name="blocks.12.hook_resid_post")
    plain = sae_files.write_saelens(tmp_path / "sae", "standard", rng, **old)
    names = ("jbloom/Gemma-2b-Residual-Stream-SAEs/sae", "models--JoshEngels--Mistral-7B-Residual-Stream-SAEs/x")
    factor, rescaled = (shutil.copytree(plain.folder, tmp_path / name) for name in names)
    np.testing.assert_allclose(open_sae(str(factor)).read("w_enc"), plain.tensors["W_enc"] * 0.21381938399317255)
    assert open_sae(str(rescaled)).spec.input_scaling == "constant_norm"
    old |= {"normalize_activations": "none", "hook_name": "blocks.8.hook_resid_pre"}
    sae_files.write_saelens(tmp_path / "jbloom/GPT2-Small-SAEs-Reformatted/x", "standard", rng, **old)
    assert open_sae(str(tmp_path / "jbloom/GPT2-Small-SAEs-Reformatted/x")).spec.input_scaling == "centred"


def test_older_configurations_are_read(tmp_path: Path, rng):
    """cfg.json of sparsify before `transcode`, `signed` and `num_latents`, and of SAELens 2."""
    sparse = sae_files.write_sparsify(tmp_path / "sparsify", rng)
    old = {"expansion_factor": WIDTH / D_IN, "normalize_decoder": True, "k": K, "signed": False, "d_in": D_IN}
    sae_files.write_json(sparse.folder / "cfg.json", old)
    lens = sae_files.write_saelens(tmp_path / "saelens", "standard", rng)
    place = {"hook_point": "blocks.0.hook_resid_pre", "hook_point_layer": 0, "hook_point_head_index": None}
    training = {"l1_coefficient": 8e-05, "lr": 0.0004, "total_training_tokens": 300000000, "use_ghost_grads": False}
    values = {"d_in": D_IN, "d_sae": WIDTH, "dtype": "torch.float32", "normalize_activations": False}
    sae_files.write_json(lens.folder / "cfg.json", place | training | values | {"model_name": "gpt2-small"})
    assert open_sae(str(sparse.folder)).spec.k == K
    assert open_sae(str(lens.folder)).hook_name == "blocks.0.hook_resid_pre"
    assert "b_in" in open_sae(str(lens.folder)).shapes


def test_the_identity_depends_on_values_only(tmp_path: Path, rng):
    gemma = sae_files.write_gemma_scope(tmp_path / "a", rng)
    shutil.copytree(tmp_path / "a", tmp_path / "b" / "c")
    np.savez(tmp_path / "a" / "params.npz", **dict(reversed(gemma.tensors.items())))
    first = open_sae(str(tmp_path / "a")).identity
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert first == open_sae(str(tmp_path / "b" / "c")).identity
    for name, values in gemma.tensors.items():
        changed = values.copy()
        changed.flat[-1] += 1
        np.savez(tmp_path / "a" / "params.npz", **{**gemma.tensors, name: changed})
        assert open_sae(str(tmp_path / "a")).identity != first, name


def test_the_identity_depends_on_the_configuration(tmp_path: Path):
    def identity(name: str, architecture: str, **config: object) -> str:
        return open_sae(str(lens(architecture, **config)(tmp_path / name, np.random.default_rng(0)).folder)).identity

    changes = [{"k": K + 1}, {"apply_b_dec_to_input": False}, {"normalize_activations": "layer_norm"}]
    changes += [{}, {"rescale_acts_by_decoder_norm": True}]
    assert len({identity(str(number), "topk", **change) for number, change in enumerate(changes)}) == 5
    assert identity("a", "standard") == identity("b", "standard", is_old=True, seed=3)  # harmless attributes


ADDRESSED = {
    "gemma_scope": (sae_files.write_gemma_scope, "params.npz"),
    "saelens": (lens("standard"), "sae_weights.safetensors"),
    "llama_scope": (sae_files.write_llama_scope, "checkpoints/final.safetensors"),
}


@pytest.mark.parametrize("name", ADDRESSED)
def test_folders_and_files_in_them_are_read(name: str, tmp_path: Path, rng, monkeypatch):
    write, file = ADDRESSED[name]
    write(tmp_path / "sae", rng)
    fs = fsspec.filesystem("memory")
    for path, content in contents(tmp_path).items():
        fs.pipe_file(f"/saes/{name}/{path}", content)
    expected = open_sae(str(tmp_path / "sae")).identity
    monkeypatch.chdir(tmp_path / "sae")
    for address in (f"{tmp_path}/sae/{file}", f"{tmp_path}/sae/", f"memory://saes/{name}/sae", file, ".", f"./{file}"):
        assert open_sae(address).identity == expected
    assert open_sae(f"memory://saes/{name}/sae/{file}").identity == expected


@pytest.fixture
def hub(tmp_path: Path, monkeypatch) -> Iterator[object]:
    with hub_for_this_process(tmp_path / "hub", monkeypatch) as server:
        yield server


def test_folders_of_the_hub_are_read(tmp_path: Path, rng, hub):
    folders = {name: write(tmp_path / "saes" / name / "sae", rng).folder for name, (write, _) in ADDRESSED.items()}
    shutil.copytree(folders["saelens"], tmp_path / "saes" / "layer_0.pt")
    hub.push("models/owner/saes", contents(tmp_path / "saes"))
    assert open_sae("hf://owner/saes/layer_0.pt").identity == open_sae(str(folders["saelens"])).identity
    for name, folder in folders.items():
        expected = open_sae(str(folder)).identity
        assert open_sae(f"hf://owner/saes/{name}/sae").identity == expected
        assert open_sae(f"hf://owner/saes@main/{name}/sae/{ADDRESSED[name][1]}").identity == expected
    tracer = sae_files.write_circuit_tracer(tmp_path / "tracer", rng).folder
    hub.push("models/owner/tracer", contents(tracer.parent))
    assert open_sae(f"hf://owner/tracer@main/{tracer.name}").identity == open_sae(str(tracer)).identity
    with pytest.raises(CheckpointError, match="hf://owner/saes/saelens has none of cfg.json"):
        open_sae("hf://owner/saes/saelens")
    with pytest.raises(CheckpointError, match="the Hub refuses access"):
        open_sae("hf://owner/absent/sae")


def test_an_address_names_a_revision(tmp_path: Path, rng, hub):
    commits = []
    for _ in range(2):
        sae_files.write_saelens(tmp_path / "saes" / "sae", "topk", rng)
        commits.append(hub.push("models/owner/saes", contents(tmp_path / "saes")))
    first, last = (open_sae(f"hf://owner/saes@{commit}/sae").identity for commit in commits)
    assert first != last == open_sae("hf://owner/saes/sae").identity


Damage = Callable[[Path, np.random.Generator], object]


def tensors_changed(write: Write, change: Callable[[dict[str, np.ndarray]], object]) -> Damage:
    def damage(folder: Path, rng: np.random.Generator) -> None:
        tensors = dict(write(folder, rng).tensors)
        change(tensors)
        file = next(file for file in folder.rglob("*") if file.suffix in (".safetensors", ".npz"))
        save = (lambda: np.savez(file, **tensors)) if file.suffix == ".npz" else (lambda: save_file(tensors, file))
        save()

    return damage


def transposed(name: str) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda tensors: tensors.update({name: np.ascontiguousarray(tensors[name].T)})


def pickled_npz(folder: Path, rng: np.random.Generator) -> None:
    tensors = dict(sae_files.write_gemma_scope(folder, rng).tensors)
    np.savez(folder / "params.npz", **{**tensors, "b_enc": np.array([{}] * WIDTH, object)})


def npz_compressed(folder: Path, rng: np.random.Generator) -> None:
    np.savez_compressed(folder / "params.npz", **sae_files.write_gemma_scope(folder, rng).tensors)


def npz_with_header(shape: tuple[int, ...], content: bytes = b"") -> Damage:
    """An array whose header has a wrong shape."""

    def damage(folder: Path, rng: np.random.Generator) -> None:
        sae_files.write_gemma_scope(folder, rng)
        with zipfile.ZipFile(folder / "params.npz", "a") as archive, archive.open("extra.npy", "w") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            file.write(content)

    return damage


def npz_with_two_names(folder: Path, rng: np.random.Generator) -> None:
    """A member without the ending of an array's name."""
    sae_files.write_gemma_scope(folder, rng)
    with zipfile.ZipFile(folder / "params.npz", "a") as archive:
        archive.writestr("W_enc", archive.read("W_enc.npy"))


def npz_with_text(header: bytes, version: int = 1) -> Damage:
    """An array whose header is this text."""

    def damage(folder: Path, rng: np.random.Generator) -> None:
        sae_files.write_gemma_scope(folder, rng)
        length = len(header).to_bytes(2 * version, "little")
        with zipfile.ZipFile(folder / "params.npz", "a") as archive:
            archive.writestr("extra.npy", b"\x93NUMPY" + bytes([version, 0]) + length + header)

    return damage


HEADERS = {
    "parentheses": b"(" * 9000,
    "a number of 5,000 digits": b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"9" * 5000 + b",), }",
}


def removed(write: Write, name: str) -> Damage:
    return lambda folder, rng: (write(folder, rng).folder / name).unlink()


YAMLS = {
    "an alias": "activation: &a relu\nmodel_name: *a",
    "no end": "model_name: 'a",
    "twice": "model_name: a\nmodel_name: b",
    "below": "model_name:\n  a",
    "goes on": "model_name: a\n  b",
    "a list": "model_name:\n- a",
}


def traced(config: str) -> Damage:
    """config.yaml beside a ReLU transcoder."""

    def damage(folder: Path, rng: np.random.Generator) -> None:
        sae_files.write_circuit_tracer(folder, rng)
        (folder / "config.yaml").write_bytes(config.encode())

    return damage


REFUSED: dict[str, tuple[Damage, str]] = {
    "a folder of several": (
        sae_files.write_circuit_tracer,
        "Name the file of one SAE: .*/sae/layer_7.safetensors",
    ),
    "no files": (lambda folder, rng: folder.mkdir(), "is not an SAE: expected cfg.json and sae_weights.* got no files"),
    "without weights": (removed(lens("standard"), "sae_weights.safetensors"), "is not an SAE.*got cfg.json"),
    "another width": (lens("standard", d_sae=WIDTH + 1), r"W_enc has shape \(12, 40\), expected \(12, 41\)"),
    "temporal": (lens("standard", architecture="temporal"), "'temporal', which is not implemented"),
    "batchtopk": (lens("jumprelu", architecture="batchtopk"), "'batchtopk'.*save_inference_model"),
    "jumprelu as relu": (lens("jumprelu", architecture="standard"), "threshold is unexpected"),
    "topk of a transcoder": (lens("transcoder", activation_fn="topk"), "activation_fn is 'topk'.*implemented: relu"),
    "normalisation": (lens("standard", normalize_activations="covariance_whitening"), "is 'cova.*Fold the whitening"),
    "factor elsewhere": (lens("standard", normalize_activations="expected_average_only_in"), "Fold it in with SAELens"),
    "heads elsewhere": (lens("standard", reshape_activations="hook_z"), "reshape_activations is hook_z, but the SAE"),
    "centred and scaled": (
        lens("standard", **CENTRED, normalize_activations="constant_norm_rescale"),
        "center_writing_weights is True and normalize_activations is constant_norm_rescale",
    ),
    "one head": (lens("standard", is_old=True, hook_head_index=2), "hook_head_index is 2"),
    "decoder norms": (lens("jumprelu", rescale_acts_by_decoder_norm=True), "rescale_acts_by_decoder_norm is True"),
    "unknown attribute": (lens("standard", tied=True, warp=0), "sets tied=True, warp=0, which this program does not"),
    "k above the width": (lens("topk", k=WIDTH + 1), "k is 41, expected at most d_sae, 40"),
    "transcoder with b_dec": (lens("transcoder", apply_b_dec_to_input=True), "apply_b_dec_to_input is true"),
    "missing tensor": (tensors_changed(lens("gated"), lambda t: t.pop("r_mag")), "r_mag is missing"),
    "unexpected tensor": (
        tensors_changed(lens("standard"), lambda t: t.update(W_gate=t["W_enc"])),
        "W_gate is unexpected",
    ),
    "scales of features": (
        tensors_changed(lens("standard"), lambda t: t.update(scaling_factor=t["b_enc"])),
        "scaling_factor is unexpected",
    ),
    "transposed": (
        tensors_changed(lens("standard"), transposed("W_enc")),
        r"W_enc has shape \(40, 12\), expected \(12, 40\)",
    ),
    "groupmax": (sparse(activation="groupmax"), "activation is 'groupmax', which is not implemented"),
    "gemma, no biases": (
        tensors_changed(GEMMA, lambda t: t.pop("b_enc")),
        "expected b_enc with the axes F, b_dec with the axes D, got",
    ),
    "gemma, pickled": (pickled_npz, "b_enc has dtype object.*Pickled objects are never read"),
    "gemma, compressed": (npz_compressed, "expected members that are stored, got compr.*Save it again with np.savez"),
    "gemma, huge shape": (npz_with_header((1 << 40, 1 << 40)), "is not a valid .npz file: expected .* bytes of extra"),
    "gemma, negative shape": (npz_with_header((-1, -2), bytes(8)), "is not a valid .npz file: expected .* of extra"),
    "gemma, two names": (npz_with_two_names, "expected different names for all arrays"),
    **{f"gemma, {what}": (npz_with_text(header), "is not a valid .npz file") for what, header in HEADERS.items()},
    **{f"tracer, {what}": (traced(yaml), r"config\.yaml: expected one string") for what, yaml in YAMLS.items()},
    "tracer, large": (traced("#" * (64 << 10) + "\nmodel_name: a"), "bytes, expected at most 65,536"),
    "tracer, topk": (traced("activation: topk"), "is 'topk', which is not implemented .implemented: relu.. .*no thres"),
    "tracer, jump_relu": (traced("activation: jump_relu"), "is 'jump_relu', .* has no thresholds"),
    "gemma 2, crosscoder": (gemma_2(type="crosscoder"), "type is 'crosscoder'"),
    "llama, no norms": (llama(dataset_average_activation_norm=None), "dataset_average_activation_norm has no 'in'"),
    "llama, other norms": (
        llama(dataset_average_activation_norm={"in": 1.0, "out": 1.0, "scale": 2.0}),
        "dataset_average_activation_norm sets scale=2.0",
    ),
    "llama, gate": (llama(use_glu_encoder=True), "use_glu_encoder is True"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_damaged_and_unknown_files_are_refused(case: str, tmp_path: Path, rng):
    damage, message = REFUSED[case]
    damage(tmp_path / "sae", rng)
    address = tmp_path / "sae" / ("layer_7.safetensors" if case.startswith("tracer") else "")
    with pytest.raises(CheckpointError, match=f"(?s){message}") as refused:
        open_sae(str(address))
    assert refused.value.exit_code == 2
    assert len(str(refused.value)) < 1500


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", "the SAE's address is ''"),
        ("absent/folder", "got none of them"),
        ("hf://owner", "expected hf://owner/name/folder"),
        ("hf://datasets/owner/name/folder", "expected hf://owner/name/folder"),
        ("memory://no/such/folder", "is not an SAE.*got no files"),
        ("nosuch://bucket/folder", "the SAE's address is 'nosuch://bucket/folder', which cannot be opened"),
    ],
)
def test_other_addresses_are_refused(address: str, message: str):
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        open_sae(address)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("case", "tensor", "array"),
    [
        ("standard", "W_enc", "w_enc"),
        ("gemma_scope", "threshold", "threshold"),
        ("sparsify", "encoder.bias", "b_enc"),
        ("llama_scope", "decoder.weight", "w_dec"),
    ],
)
def test_values_that_are_not_finite_are_refused(case: str, tensor: str, array: str, value: float, tmp_path: Path, rng):
    tensors_changed(CASES[case][0], lambda t: t[tensor].flat.__setitem__(3, value))(tmp_path / "sae", rng)
    sae = open_sae(str(tmp_path / "sae"))
    with pytest.raises(CheckpointError, match=f"{tensor} has 1 values that are infinite or NaN"):
        sae.read(array)
    with pytest.raises(CheckpointError, match=f"{tensor} has 1 values"):
        _ = sae.identity


@pytest.mark.parametrize(
    ("write", "tensor", "value", "message"),
    [
        (lens("gated"), "r_mag", 100, "gate_scale, computed from r_mag, would have 40 values"),
        (llama_r1(), "decoder.weight", np.inf, "threshold, computed from log_jumprelu_threshold, would have 40 values"),
        (llama_r1(), "decoder.weight", np.nan, "threshold, computed from log_jumprelu_threshold, would have 40 values"),
        (llama(has_norms=True), "decoder.weight", np.nan, "decoder.weight has 480 values"),
    ],
)
def test_computed_values_that_are_not_finite_are_refused(write, tensor, value, message, tmp_path: Path, rng):
    tensors_changed(write, lambda t: t[tensor].fill(value))(tmp_path / "sae", rng)
    with pytest.raises(CheckpointError, match=message):
        open_sae(str(tmp_path / "sae")).read("gate_scale" if tensor == "r_mag" else "threshold")


@pytest.mark.parametrize("write", [llama_r1(), llama(has_norms=True)])
def test_features_without_a_decoder_row_never_fire(write: Write, tmp_path: Path, rng):
    tensors_changed(write, lambda t: t["decoder.weight"][:, :7].fill(0))(tmp_path / "sae", rng)
    values = encode_dense(open_sae(str(tmp_path / "sae")), tokens(rng))
    assert not values[:, :7].any()
    assert values[:, 7:].any()


def test_an_npz_is_read_in_either_order_and_its_checksums_are_compared(tmp_path: Path, rng):
    written = sae_files.write_gemma_scope(tmp_path, rng)
    file = tmp_path / "params.npz"
    np.savez(file, **{**written.tensors, "W_enc": np.asfortranarray(written.tensors["W_enc"])})
    values = open_sae(str(tmp_path)).read("w_enc")
    np.testing.assert_array_equal(values, written.tensors["W_enc"])
    assert values.flags.c_contiguous
    content = bytearray(file.read_bytes())
    content[500] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="params.npz: expected the CRC-32"):
        open_sae(str(tmp_path)).read("w_enc")


@pytest.mark.parametrize("case", ["standard", "gemma_scope"])
def test_random_damage_never_raises_another_error(case: str, tmp_path: Path, rng):
    folder = CASES[case][0](tmp_path / "sae", rng).folder
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        for _ in range(150):
            damaged = bytearray(content)
            for place in rng.integers(0, min(len(content), int(rng.choice([300, len(content)]))), size=3):
                damaged[place] = rng.integers(256)
            if rng.random() < 0.3:
                damaged = damaged[: rng.integers(len(content))]
            file.write_bytes(damaged)
            try:
                open_sae(str(folder)).arrays()
            except PipelineError as error:
                assert error.exit_code == 2  # noqa: PT017 - damage may give other valid values
        file.write_bytes(content)
