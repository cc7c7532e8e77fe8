"""Tiny SAEs in files of torch.save, in each layout that is read, and what their authors' code computes."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from tests.models.sae_files import D_IN, WIDTH, K, normal, write_json

Tensors = Mapping[str, np.ndarray]
CLASSES = ("AutoEncoder", "AutoEncoderNew", "AutoEncoderTopK", "BatchTopKSAE", "MatryoshkaBatchTopKSAE")
CLASSES += ("JumpReluAutoEncoder", "GatedAutoEncoder")
FILES = {
    **dict.fromkeys(CLASSES, "ae.pt"),
    "Qwen-Scope": f"SAE-Res-Qwen3-1.7B-Base-W1K-L0_{K}/layer7.sae.pt",
    "Goodfire": "Llama-3.1-8B-Instruct-SAE-l19.pth",
    "DeepSeek-R1": "DeepSeek-R1-Distill-Llama-8B-SAE-l19.pt",
    "hook_z": "gpt2-small_L3_Hcat_z_lr1.20e-03_v9.pt",
}


def num_features(kind: str) -> int:
    return 1024 if kind == "Qwen-Scope" else WIDTH  # of which there are whole thousands in the repository's name


def state_dict(kind: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random tensors, by their names in the file."""
    width = num_features(kind)
    encoder, decoder = normal(rng, width, D_IN, scale=D_IN**-0.5), normal(rng, D_IN, width)
    b_enc, b_dec = normal(rng, width, scale=0.3), normal(rng, D_IN, scale=0.3)
    linear = {"encoder.weight": encoder, "decoder.weight": decoder, "encoder.bias": b_enc}
    plain = {"W_enc": encoder.T.copy(), "W_dec": decoder.T.copy(), "b_enc": b_enc, "b_dec": b_dec}
    training = {"threshold": np.float32(0.2), "k": np.int32(K)}
    gates = {name: normal(rng, WIDTH, scale=0.3) for name in ("r_mag", "gate_bias", "mag_bias")}
    states = {
        "AutoEncoder": linear | {"bias": b_dec},
        "AutoEncoderNew": linear | {"decoder.bias": b_dec},
        "AutoEncoderTopK": linear | {"b_dec": b_dec} | training,
        "BatchTopKSAE": linear | {"b_dec": b_dec} | training,
        "MatryoshkaBatchTopKSAE": plain | training | {"group_sizes": np.array([10, WIDTH - 10])},
        "JumpReluAutoEncoder": plain | {"threshold": np.abs(normal(rng, WIDTH, scale=0.3))},
        "GatedAutoEncoder": {"encoder.weight": encoder, "decoder.weight": decoder, "decoder_bias": b_dec} | gates,
        "Qwen-Scope": plain | {"W_enc": encoder, "W_dec": decoder},
        "Goodfire": {name.replace(".", "_linear."): values for name, values in linear.items()}
        | {"decoder_linear.bias": b_dec},
        "DeepSeek-R1": linear | {"decoder.bias": b_dec},
        "hook_z": plain,
    }
    return {name: np.asarray(values) for name, values in states[kind].items()}


def features(kind: str, t: Tensors, x: np.ndarray) -> np.ndarray:
    """What the authors' `encode` returns, in the dtype of its arguments."""
    t = {name.replace("_linear.", "."): values for name, values in t.items()}
    encoder = t["W_enc"] if "W_enc" in t else t["encoder.weight"].T
    bias = {"AutoEncoder": "bias", "GatedAutoEncoder": "decoder_bias"}.get(kind, "b_dec")
    x = x if kind in ("AutoEncoderNew", "JumpReluAutoEncoder", "Qwen-Scope", "Goodfire", "DeepSeek-R1") else x - t[bias]
    linear = x @ (t["W_enc"].T if kind == "Qwen-Scope" else encoder)
    if kind == "GatedAutoEncoder":
        return (linear + t["gate_bias"] > 0) * np.maximum(np.exp(t["r_mag"]) * linear + t["mag_bias"], 0)
    pre = linear + t.get("encoder.bias", t.get("b_enc"))
    positive = np.maximum(pre, 0)
    match kind:
        case "AutoEncoderTopK" | "Qwen-Scope":
            return np.where(positive >= np.sort(positive)[..., -K, None], positive, 0)
        case "BatchTopKSAE" | "MatryoshkaBatchTopKSAE":
            return positive * (positive > t["threshold"])
        case "JumpReluAutoEncoder":
            return positive * (pre > t["threshold"])
    return positive


def write(
    kind: str, folder: Path, state: Mapping[str, object], save: Callable[[object, Path], object], **trainer: object
) -> Path:
    """Writes a state dict and the configuration beside it. Returns the path to open. save: `torch.save`, which gets
    tensors in place of arrays. trainer: attributes of dictionary_learning's config.json."""
    import torch

    file = folder / FILES[kind]
    file.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: values for name, values in state.items() if isinstance(values, np.ndarray | np.generic)}
    save({**state, **{name: torch.from_numpy(np.array(values)) for name, values in arrays.items()}}, file)
    if kind == "hook_z":
        config = {"act_size": D_IN, "dict_size": WIDTH, "act_name": "blocks.3.attn.hook_z", "seq_len": 128, "lr": 1e-3}
        write_json(file.with_name(f"{file.stem}_cfg.json"), config | {"model_name": "gpt2-small"})
    if kind in CLASSES:
        config = {"dict_class": kind, "activation_dim": D_IN, "dict_size": WIDTH, "k": K, "lm_name": "org/tiny"}
        config |= {"layer": 12, "submodule_name": "resid_post_layer_12", "lr": 1e-4}
        write_json(folder / "config.json", {"trainer": config | trainer, "buffer": {"ctx_len": 128, "io": "out"}})
    return folder if kind in CLASSES else file
