"""Converts pickled SAEs into SAELens's format, which the job reads: cfg.json and sae_weights.safetensors.

    python scripts/convert_sae.py INPUT OUTPUT [--k K] [--hook-name blocks.12.hook_resid_post] [--unit-decoder]

INPUT is either

* a folder from dictionary_learning (https://github.com/saprmarks/dictionary_learning) with ae.pt and config.json, for
  one of the classes AutoEncoder, AutoEncoderNew, AutoEncoderTopK, BatchTopKSAE, MatryoshkaBatchTopKSAE,
  JumpReluAutoEncoder and GatedAutoEncoder; or
* a layer of Qwen-Scope (https://huggingface.co/collections/Qwen/qwen-scope): layerN.sae.pt. Its k is the number after
  "L0_" in the repository's name: set it with --k, or keep that name for the folder.

Run it in an environment with torch, numpy and safetensors. Weights are loaded with `weights_only=True`, so a pickle
that would run code is refused. Features fire with the same values as in `encode` of the original class. With
--unit-decoder, they are multiplied by the norms of the decoder's rows, which become 1; `load_dictionary` does this for
AutoEncoder, and versions of dictionary_learning before 0.1 also did it for JumpReluAutoEncoder and GatedAutoEncoder.
"""

import argparse
import json
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

Arrays = dict[str, np.ndarray]
Converted = tuple[dict[str, object], Arrays]  # the architecture in cfg.json, and SAELens's tensors

_AUTO_ENCODER = ("encoder.weight", "encoder.bias", "decoder.weight", "bias")
_TOP_K = ("encoder.weight", "encoder.bias", "decoder.weight", "b_dec", "k", "threshold")
_MATRYOSHKA = ("W_enc", "b_enc", "W_dec", "b_dec", "k", "threshold", "group_sizes")
_GATED = ("encoder.weight", "decoder.weight", "decoder_bias", "r_mag", "gate_bias", "mag_bias")
_OPTIONAL = ("k", "threshold")  # not saved by the first versions of AutoEncoderTopK


def auto_encoder(state: Arrays) -> Converted:
    tensors = {**_linear(state), "b_dec": state["bias"]}
    return {"architecture": "standard", "apply_b_dec_to_input": True}, tensors


def auto_encoder_new(state: Arrays) -> Converted:
    tensors = {**_linear(state), "b_dec": state["decoder.bias"]}
    return {"architecture": "standard", "apply_b_dec_to_input": False}, tensors


def top_k(state: Arrays) -> Converted:
    """Drops the threshold, which `encode` does not use by default."""
    tensors = {**_linear(state), "b_dec": state["b_dec"]}
    return {"architecture": "topk", "apply_b_dec_to_input": True, "rescale_acts_by_decoder_norm": False}, tensors


def batch_top_k(state: Arrays) -> Converted:
    """At inference, this is a JumpReLU with a single threshold. A negative threshold was never set, and keeps all
    positive features."""
    tensors = {**_linear(state), "b_dec": state["b_dec"]}
    tensors["threshold"] = np.full_like(tensors["b_enc"], state["threshold"])
    return {"architecture": "jumprelu", "apply_b_dec_to_input": True}, tensors


def matryoshka(state: Arrays) -> Converted:
    tensors = {name: state[name] for name in ("W_enc", "b_enc", "W_dec", "b_dec")}
    tensors["threshold"] = np.full_like(tensors["b_enc"], state["threshold"])
    return {"architecture": "jumprelu", "apply_b_dec_to_input": True}, tensors


def jump_relu(state: Arrays) -> Converted:
    return {"architecture": "jumprelu", "apply_b_dec_to_input": False}, dict(state)


def gated(state: Arrays) -> Converted:
    tensors = {
        "W_enc": state["encoder.weight"].T,
        "b_gate": state["gate_bias"],
        "b_mag": state["mag_bias"],
        "r_mag": state["r_mag"],
        "W_dec": state["decoder.weight"].T,
        "b_dec": state["decoder_bias"],
    }
    return {"architecture": "gated", "apply_b_dec_to_input": True}, tensors


def qwen_scope(state: Arrays) -> Converted:
    tensors = {"W_enc": state["W_enc"].T, "b_enc": state["b_enc"], "W_dec": state["W_dec"].T, "b_dec": state["b_dec"]}
    return {"architecture": "topk", "apply_b_dec_to_input": False, "rescale_acts_by_decoder_norm": False}, tensors


_CLASSES: Mapping[str, tuple[Callable[[Arrays], Converted], tuple[str, ...]]] = {
    "AutoEncoder": (auto_encoder, _AUTO_ENCODER),
    "AutoEncoderNew": (auto_encoder_new, ("encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias")),
    "AutoEncoderTopK": (top_k, _TOP_K),
    "BatchTopKSAE": (batch_top_k, _TOP_K),
    "MatryoshkaBatchTopKSAE": (matryoshka, _MATRYOSHKA),
    "JumpReluAutoEncoder": (jump_relu, ("W_enc", "b_enc", "W_dec", "b_dec", "threshold")),
    "GatedAutoEncoder": (gated, _GATED),
    "Qwen-Scope": (qwen_scope, ("W_enc", "b_enc", "W_dec", "b_dec")),
}


def _linear(state: Arrays) -> Arrays:
    """Transposes the weights of torch.nn.Linear, which have a row per output."""
    return {
        "W_enc": state["encoder.weight"].T,
        "b_enc": state["encoder.bias"],
        "W_dec": state["decoder.weight"].T,
    }


def with_unit_decoder(config: Mapping[str, object], tensors: Arrays) -> Arrays:
    """The same SAE with decoder rows of norm 1. Its features are multiplied by the original norms."""
    if config["architecture"] == "topk":
        sys.exit("--unit-decoder would change which features of a TopK SAE fire. Do not use it.")
    norms = np.linalg.norm(tensors["W_dec"], axis=1)
    if not norms.all():
        sys.exit("--unit-decoder: the decoder has rows of zeros. Do not use it.")
    scaled = {
        name: tensors[name] * norms for name in ("W_enc", "b_enc", "b_mag", "b_gate", "threshold") if name in tensors
    }
    return {**tensors, **scaled, "W_dec": tensors["W_dec"] / norms[:, None]}


def read_trainer(path: Path) -> Mapping[str, object]:
    """The section `trainer` of dictionary_learning's config.json."""
    try:
        trainer = json.loads(path.read_text())["trainer"]
        return {"k": None, **trainer, "dict_class": str(trainer["dict_class"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{path}: expected dictionary_learning's configuration, with trainer.dict_class: {error!r}")


def load_state(path: Path) -> Arrays:
    """The tensors of a pickled state dict, in float32."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        sys.exit(f"{path} does not exist. Check the path.")
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        sys.exit(f"{path}: expected a pickled dict of tensors and nothing else: {error}")
    if not isinstance(state, dict) or not all(isinstance(values, torch.Tensor) for values in state.values()):
        sys.exit(f"{path}: expected a dict of tensors, got something else. Is it an SAE's state dict?")
    return {name.removeprefix("_orig_mod."): values.float().numpy() for name, values in state.items()}


def convert(kind: str, state: Arrays, k: int | None, where: Path) -> Converted:
    if kind not in _CLASSES:
        sys.exit(f"{where}: the class {kind} is not implemented (implemented: {', '.join(_CLASSES)}).")
    function, names = _CLASSES[kind]
    needed = {*names} - ({*_OPTIONAL} if function is top_k else {"k"})
    if not needed <= state.keys() <= {*names}:
        sys.exit(f"{where}: expected the tensors {', '.join(names)} of {kind}, got {', '.join(sorted(state))}.")
    config, tensors = function(state)
    if config["architecture"] == "topk":
        saved = int(state["k"]) if "k" in state else k
        if saved is None or k not in (None, saved):
            sys.exit(f"{where}: k is {saved} in the file and {k} in the configuration. Set the correct one with --k.")
        config["k"] = saved
    return config, tensors


def save(folder: Path, config: Mapping[str, object], tensors: Arrays, metadata: Mapping[str, object]) -> None:
    d_in, d_sae = tensors["W_enc"].shape
    if tensors["W_dec"].shape != (d_sae, d_in):
        sys.exit(f"W_dec has shape {tensors['W_dec'].shape}, expected {(d_sae, d_in)}, the transpose of W_enc's.")
    values = {
        **config,
        "d_in": d_in,
        "d_sae": d_sae,
        "dtype": "float32",
        "device": "cpu",
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": {"sae_lens_version": "6.0.0", **{key: value for key, value in metadata.items() if value}},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cfg.json").write_text(json.dumps(values, indent=1))
    arrays = {name: np.ascontiguousarray(values, np.float32) for name, values in tensors.items()}
    save_file(arrays, folder / "sae_weights.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--k", type=int, help="features per token, for TopK SAEs whose file does not contain it")
    parser.add_argument("--hook-name", help="the hook it was trained on, such as blocks.12.hook_resid_post")
    parser.add_argument("--unit-decoder", action="store_true", help="fold the norms of the decoder's rows")
    options = parser.parse_args()
    if options.input.is_dir():
        trainer = read_trainer(options.input / "config.json")
        kind, path, k = trainer["dict_class"], options.input / "ae.pt", trainer["k"]
        metadata = {"model_name": trainer.get("lm_name"), "hook_name": options.hook_name}
    else:
        number = re.search(r"layer(\d+)\.sae\.pt$", str(options.input))
        size = re.search(r"L0_(\d+)", str(options.input))
        if number is None:
            sys.exit(f"{options.input}: expected a folder with ae.pt and config.json, or a file layerN.sae.pt.")
        kind, path, k = "Qwen-Scope", options.input, int(size[1]) if size else None
        metadata = {"hook_name": options.hook_name or f"blocks.{number[1]}.hook_resid_post"}
    config, tensors = convert(kind, load_state(path), options.k or k, path)
    if options.unit_decoder:
        tensors = with_unit_decoder(config, tensors)
    save(options.output, config, tensors, metadata)
    print(f"{options.output}: {config['architecture']}, {tensors['W_enc'].shape[1]} features")


if __name__ == "__main__":
    main()
