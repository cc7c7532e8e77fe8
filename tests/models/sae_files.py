"""Tiny SAEs with random weights in each published format, and a reference implementation in plain numpy.

The writers follow the published descriptions of the formats. Each returns what it wrote: the folder, the configuration,
and the tensors by their names in the file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from pipeline.models.sae.loading import SAE
from pipeline.models.sae.spec import FeatureActivation, InputScaling, SAESpec

D_IN, WIDTH, D_OUT, K = 12, 40, 9, 5


@dataclass(frozen=True)
class Written:
    """A written checkpoint. `folder` is the file of a format whose folders have several SAEs."""

    folder: Path
    config: Mapping[str, object]
    tensors: Mapping[str, np.ndarray]


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def write_json(path: Path, values: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


def write_saelens(
    folder: Path,
    architecture: str,
    rng: np.random.Generator,
    /,
    *,
    is_old: bool = False,
    num_inputs: int = D_IN,
    **config: object,
) -> Written:
    """Writes the cfg.json of version 6, or with `is_old` of version 3. `config` adds or replaces attributes."""
    is_transcoder = architecture.endswith("transcoder")
    d_out = D_OUT if is_transcoder else num_inputs
    names = ("b_gate", "b_mag", "r_mag") if architecture == "gated" else ("b_enc",)
    tensors = {
        "W_enc": normal(rng, num_inputs, WIDTH, scale=num_inputs**-0.5),
        "W_dec": normal(rng, WIDTH, d_out),
        "b_dec": normal(rng, d_out, scale=0.3),
        **{name: normal(rng, WIDTH, scale=0.3) for name in names},
    }
    if "jumprelu" in architecture:
        tensors["threshold"] = rng.uniform(0, 0.6, WIDTH).astype(np.float32)
    if "skip" in architecture:
        tensors["W_skip"] = normal(rng, d_out, num_inputs)
    place = {"model_name": "tiny", "hook_name": "blocks.1.hook_resid_post", "prepend_bos": True}
    values: dict[str, object] = {
        "architecture": architecture,
        "d_in": num_inputs,
        "d_sae": WIDTH,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": not is_transcoder,
        "normalize_activations": "none",
    }
    if is_old:
        values |= place | {"hook_layer": 1, "hook_head_index": None, "finetuning_scaling_factor": False}
        values |= {"activation_fn_str": "relu", "activation_fn_kwargs": {}, "sae_lens_training_version": "3.11.2"}
    else:
        values |= {"reshape_activations": "none", "metadata": place | {"sae_lens_version": "6.54.12"}}
    if architecture == "topk":
        if is_old:
            values |= {"architecture": "standard", "activation_fn_str": "topk", "activation_fn_kwargs": {"k": K}}
        else:
            values |= {"k": K, "rescale_acts_by_decoder_norm": False}
    if is_transcoder:
        values |= {"d_out": d_out}
    return _written(folder, "cfg.json", values | config, "sae_weights.safetensors", tensors)


def write_gemma_scope(folder: Path, rng: np.random.Generator) -> Written:
    tensors = {
        "W_enc": normal(rng, D_IN, WIDTH, scale=D_IN**-0.5),
        "W_dec": normal(rng, WIDTH, D_IN),
        "b_enc": normal(rng, WIDTH, scale=0.3),
        "b_dec": normal(rng, D_IN, scale=0.3),
        "threshold": rng.uniform(0, 0.6, WIDTH).astype(np.float32),
    }
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "params.npz", **tensors)
    return Written(folder, {}, tensors)


def write_gemma_scope_2(folder: Path, rng: np.random.Generator, *, kind: str = "sae", **config: object) -> Written:
    """A transcoder also has a skip connection (`affine_connection`)."""
    d_out = D_OUT if kind == "transcoder" else D_IN
    tensors = {
        "w_enc": normal(rng, D_IN, WIDTH, scale=D_IN**-0.5),
        "w_dec": normal(rng, WIDTH, d_out),
        "b_enc": normal(rng, WIDTH, scale=0.3),
        "b_dec": normal(rng, d_out, scale=0.3),
        "threshold": rng.uniform(0, 0.6, WIDTH).astype(np.float32),
    }
    if kind == "transcoder":
        tensors["affine_skip_connection"] = normal(rng, D_IN, d_out)
    values = {
        "hf_hook_point_in": "model.layers.12.output",
        "hf_hook_point_out": "model.layers.12.output",
        "width": WIDTH,
        "model_name": "gemma-v3-1b-pt",
        "architecture": "jump_relu",
        "l0": 120,
        "affine_connection": kind == "transcoder",
        "type": kind,
    }
    return _written(folder, "config.json", values | config, "params.safetensors", tensors)


def write_sparsify(
    folder: Path,
    rng: np.random.Generator,
    *,
    transcode: bool = False,
    skip_connection: bool = False,
    num_inputs: int = D_IN,
    **config: object,
) -> Written:
    tensors = {
        "encoder.weight": normal(rng, WIDTH, num_inputs, scale=num_inputs**-0.5),
        "encoder.bias": normal(rng, WIDTH, scale=0.3),
        "W_dec": normal(rng, WIDTH, num_inputs),
        "b_dec": normal(rng, num_inputs, scale=0.3),
    }
    if skip_connection:
        tensors["W_skip"] = normal(rng, num_inputs, num_inputs)
    values = {
        "activation": "topk",
        "expansion_factor": 32,
        "normalize_decoder": True,
        "num_latents": WIDTH,
        "k": K,
        "multi_topk": False,
        "skip_connection": skip_connection,
        "transcode": transcode,
        "d_in": num_inputs,
    }
    return _written(folder, "cfg.json", values | config, "sae.safetensors", tensors)


def write_llama_scope(
    folder: Path,
    rng: np.random.Generator,
    *,
    hook_out: str = "blocks.24.hook_resid_post",
    has_norms: bool = False,
    **config: object,
) -> Written:
    """Writes the attributes of a published hyperparams.json. has_norms: the norms of the decoder's rows are not 1."""
    tensors = {
        "encoder.weight": normal(rng, WIDTH, D_IN, scale=D_IN**-0.5),
        "encoder.bias": normal(rng, WIDTH, scale=0.3),
        "decoder.weight": normal(rng, D_IN, WIDTH),
        "decoder.bias": normal(rng, D_IN, scale=0.3),
    }
    if not has_norms:
        tensors["decoder.weight"] /= np.linalg.norm(tensors["decoder.weight"], axis=0)
    values = {
        "device": "cuda:0",
        "seed": 42,
        "dtype": "torch.bfloat16",
        "hook_point_in": "blocks.24.hook_resid_post",
        "hook_point_out": hook_out,
        "use_decoder_bias": True,
        "apply_decoder_bias_to_pre_encoder": False,
        "expansion_factor": 32,
        "d_model": D_IN,
        "d_sae": WIDTH,
        "bias_init_method": "all_zero",
        "act_fn": "jumprelu",
        "jump_relu_threshold": 0.25,
        "norm_activation": "dataset-wise",
        "dataset_average_activation_norm": {"in": 5.125, "out": 5.125 if "resid" in hook_out else 1.75},
        "decoder_exactly_fixed_norm": False,
        "sparsity_include_decoder_norm": True,
        "use_glu_encoder": False,
        "init_decoder_norm": 0.5,
        "init_encoder_norm": None,
        "init_encoder_with_decoder_transpose": True,
        "lp": 1,
        "l1_coefficient": 8e-05,
        "l1_coefficient_warmup_steps": 78125,
        "top_k": 50,
        "k_warmup_steps": 78125,
        "use_batch_norm_mse": True,
        "use_ghost_grads": False,
        "tp_size": 1,
        "ddp_size": 1,
    }
    return _written(folder, "hyperparams.json", values | config, "checkpoints/final.safetensors", tensors)


def write_llama_scope_r1(folder: Path, rng: np.random.Generator, **config: object) -> Written:
    """The norms are 0-d tensors. DeepSeek-R1-Distill's are of residual streams; here it is a transcoder."""
    ends = {"in": "blocks.15.hook_resid_mid", "out": "blocks.15.hook_mlp_out"}
    tensors = {
        "encoder.weight": normal(rng, WIDTH, D_IN, scale=D_IN**-0.5),
        "encoder.bias": normal(rng, WIDTH, scale=0.3),
        "decoder.weight": normal(rng, D_IN, WIDTH),
        "decoder.bias": normal(rng, D_IN, scale=0.3),
        "log_jumprelu_threshold": np.log(rng.uniform(0.1, 0.6, WIDTH)).astype(np.float32),
        f"dataset_average_activation_norm.{ends['in']}": np.array(5.125, np.float32),
        f"dataset_average_activation_norm.{ends['out']}": np.array(1.75, np.float32),
    }
    values = {"sae_type": "sae", "hook_point_in": ends["in"], "hook_point_out": ends["out"], "d_model": D_IN}
    values |= {"expansion_factor": WIDTH / D_IN, "act_fn": "jumprelu", "norm_activation": "dataset-wise"}
    values |= {"use_decoder_bias": True, "apply_decoder_bias_to_pre_encoder": False, "use_glu_encoder": False}
    values |= {"top_k": 50, "sparsity_include_decoder_norm": True, "use_triton_kernel": False}
    return _written(folder, "config.json", values | config, "sae_weights.safetensors", tensors)


def write_circuit_tracer(
    folder: Path, rng: np.random.Generator, *, has_skip: bool = False, d_out: int = D_OUT
) -> Written:
    """With thresholds, if it has a skip connection."""
    tensors = {
        "W_enc": normal(rng, WIDTH, D_IN, scale=D_IN**-0.5),
        "b_enc": normal(rng, WIDTH, scale=0.3),
        "W_dec": normal(rng, WIDTH, d_out),
        "b_dec": normal(rng, d_out, scale=0.3),
    }
    if has_skip:
        threshold = rng.uniform(0, 0.6, WIDTH).astype(np.float32)
        tensors |= {"activation_function.threshold": threshold, "W_skip": normal(rng, d_out, D_IN)}
    return _circuit_tracer(folder, "layer_7.safetensors", tensors)


def write_cross_layer(folder: Path, rng: np.random.Generator) -> Written:
    tensors = {
        "W_enc_7": normal(rng, WIDTH, D_IN, scale=D_IN**-0.5),
        "b_enc_7": normal(rng, WIDTH, scale=0.3),
        "b_dec_7": normal(rng, D_IN, scale=0.3),
    }
    written = _circuit_tracer(folder, "W_enc_7.safetensors", tensors)
    save_file({"W_dec_7": normal(rng, WIDTH, 3, D_IN)}, folder / "W_dec_7.safetensors")
    return written


def _circuit_tracer(folder: Path, name: str, tensors: Mapping[str, np.ndarray]) -> Written:
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["model_name: owner/tiny", "feature_input_hook: hook_resid_mid", "feature_output_hook: hook_mlp_out"]
    (folder / "config.yaml").write_text("\n".join(lines))
    save_file(dict(tensors), folder / name)
    return Written(folder / name, {}, tensors)


def _written(
    folder: Path, config_name: str, config: Mapping[str, object], name: str, tensors: Mapping[str, np.ndarray]
) -> Written:
    write_json(folder / config_name, config)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / name)
    return Written(folder, config, tensors)


def scaled_input(spec: SAESpec, x: np.ndarray) -> np.ndarray:
    """Activations [..., D] as the SAE scales them, in float64."""
    x = np.asarray(x, np.float64)
    match spec.input_scaling:
        case InputScaling.none:
            return x
        case InputScaling.centred:
            return x - x.mean(axis=-1, keepdims=True)
        case InputScaling.constant_norm:
            return x * np.sqrt(spec.d_in) / np.linalg.norm(x, axis=-1, keepdims=True)
        case InputScaling.layer_norm:
            centred = x - x.mean(axis=-1, keepdims=True)
            return centred / (centred.std(axis=-1, ddof=1, keepdims=True) + spec.layer_norm_eps)


def encode_dense(sae: SAE, x: np.ndarray) -> np.ndarray:
    """The values of all features [..., F] for activations [..., D], in float64; 0 where a feature does not fire."""
    return dense_values(sae.spec, sae.arrays(), x)


def dense_values(spec: SAESpec, arrays: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """As `encode_dense`."""
    arrays = {name: values.astype(np.float64) for name, values in arrays.items()}
    linear = (scaled_input(spec, x) - arrays.get("b_in", 0)) @ arrays["w_enc"]
    pre = (linear + arrays["b_enc"]) * arrays.get("feature_scale", 1)
    match spec.activation:
        case FeatureActivation.relu:
            return np.maximum(pre, 0)
        case FeatureActivation.jumprelu:
            return np.where(pre > arrays["threshold"], np.maximum(pre, 0), 0)
        case FeatureActivation.topk:
            smallest = np.sort(pre, axis=-1)[..., -spec.k, None]
            return np.where(pre >= smallest, np.maximum(pre, 0), 0)
        case FeatureActivation.gated:
            values = np.maximum(linear * arrays["gate_scale"] + arrays["b_enc"], 0)
            return np.where(linear + arrays["gate_bias"] > 0, values, 0)


def decode_dense(sae: SAE, values: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The reconstruction or prediction [..., O] from values [..., F] and the activations [..., D], in float64."""
    return decoded_values(sae.spec, sae.arrays(), values, x)


def decoded_values(spec: SAESpec, arrays: Mapping[str, np.ndarray], values: np.ndarray, x: np.ndarray) -> np.ndarray:
    """As `decode_dense`."""
    arrays = {name: array.astype(np.float64) for name, array in arrays.items()}
    out = (values / arrays.get("feature_scale", 1)) @ arrays["w_dec"] + arrays.get("b_out", 0)
    x = np.asarray(x, np.float64)
    if spec.undo_scaling and spec.input_scaling is InputScaling.centred:
        out = out + x.mean(axis=-1, keepdims=True)
    if spec.undo_scaling and spec.input_scaling is InputScaling.constant_norm:
        out = out * np.linalg.norm(x, axis=-1, keepdims=True) / np.sqrt(spec.d_in)
    if spec.undo_scaling and spec.input_scaling is InputScaling.layer_norm:
        out = out * x.std(axis=-1, ddof=1, keepdims=True) + x.mean(axis=-1, keepdims=True)
    return out + (x @ arrays["w_skip"] if "w_skip" in arrays else 0)
