"""dictionary_learning (https://github.com/saprmarks/dictionary_learning): config.json and ae.pt, as SAEBench's SAEs and
many others are published.

Features fire with the same values as in `encode` of the class that config.json names, for the weights in the file, as
in SAELens. (The library's loader of AutoEncoder first makes the norms of the decoder's rows 1, which multiplies each
feature by a constant, unless it is called with normalize_decoder=False.) Other attributes are about training.
"""

import re

import numpy as np

from pipeline.core.errors import CheckpointError
from pipeline.models.checkpoints.checkpoint_files import Files, read_config
from pipeline.models.checkpoints.json_config import JsonConfig
from pipeline.models.checkpoints.torch_file import TorchFile
from pipeline.models.sae.autoencoder import SAE, Sources, TensorSource, check_tensors, coder_sources, read_number
from pipeline.models.sae.spec import MODULE_HOOKS, FeatureActivation, SAEContext, SAESpec

CONFIG, WEIGHTS = "config.json", "ae.pt"
_CLASSES = {  # the activation, and whether the decoder's bias is subtracted from the input
    "AutoEncoder": (FeatureActivation.relu, True),
    "AutoEncoderNew": (FeatureActivation.relu, False),
    "AutoEncoderTopK": (FeatureActivation.topk, True),
    "BatchTopKSAE": (FeatureActivation.jumprelu, True),  # with a single threshold, except in training
    "MatryoshkaBatchTopKSAE": (FeatureActivation.jumprelu, True),
    "JumpReluAutoEncoder": (FeatureActivation.jumprelu, False),
    "GatedAutoEncoder": (FeatureActivation.gated, True),
}
_TRAINING = ("k", "threshold", "group_sizes")  # saved by all classes with a k, which config.json has, too
_OUTPUT_BIASES = ("b_dec", "bias", "decoder_bias", "decoder.bias")
_MODULES = {"resid_post": "layer", "attention_out": "attention", "mlp_out": "mlp"}


def read_sae(files: Files) -> SAE:
    """Reads an SAE of one of the classes in `_CLASSES`, or a transcoder of that class, from a module's input to its
    output."""
    config = read_config(files, CONFIG, "SAE")
    trainer, buffer = config.nested("trainer"), config.nested("buffer")
    class_name = trainer.choice("dict_class", _CLASSES)
    activation, subtracts_bias = _CLASSES[class_name]
    d_in, width = trainer.positive_int("activation_dim"), trainer.positive_int("dict_size")
    tensors = TorchFile(files.open(WEIGHTS))
    k = trainer.positive_int("k", most=width) if activation is FeatureActivation.topk else None
    saved = tensors.tensors.get("k")  # which the first versions of AutoEncoderTopK did not save
    if k and saved and saved.dtype in ("I32", "I64"):
        number = int.from_bytes(tensors.sample("k", 1, 8), "little")
        if number != k:
            raise CheckpointError(f"{tensors.name}: k is {number}, expected {k} as in {CONFIG}. Is it another SAE's?")
    context = SAEContext(
        trainer.text("lm_name"), context_size=buffer.positive_int("ctx_len") if "ctx_len" in buffer else None
    )
    end = buffer.choice("io", ["in", "out", "in_and_out"], default="out")
    spec = SAESpec(d_in, width, d_in, activation, k, is_transcoder=end == "in_and_out")
    sae = SAE(
        *("dictionary_learning", spec, _hook_name(trainer, reads_input=end != "out"), tensors),
        *(_sources(tensors, activation, subtracts_bias), context),
    )
    return check_tensors(sae, _TRAINING if "TopK" in class_name else ())


def _hook_name(trainer: JsonConfig, *, reads_input: bool) -> str | None:
    name = trainer.text("submodule_name") or f"resid_post_layer_{trainer.values.get('layer')}"
    match = re.fullmatch(r"(\w+)_layer_(\d+)", name)
    hooks = MODULE_HOOKS.get(_MODULES.get(match[1], "")) if match else None
    return hooks and f"blocks.{match[2]}.{hooks[0 if reads_input else 1]}"


def _sources(tensors: TorchFile, activation: FeatureActivation, subtracts_bias: bool) -> Sources:
    """The sources of all arrays. Some classes have matrices as parameters, others a torch.nn.Linear, whose weight has a
    row per output."""
    names = tensors.shapes
    bias = next((name for name in _OUTPUT_BIASES if name in names), _OUTPUT_BIASES[0])
    linear, plain = ("FD OF", "encoder.weight", "encoder.bias", "decoder.weight"), ("DF FO", "W_enc", "b_enc", "W_dec")
    sources = coder_sources(*(linear if "encoder.weight" in names else plain), bias, subtracts_bias=subtracts_bias)
    if activation is FeatureActivation.jumprelu:
        is_number = names.get("threshold") == ()
        sources["threshold"] = read_number(tensors, "threshold") if is_number else TensorSource("threshold", "F")
    if activation is FeatureActivation.gated:
        sources["b_enc"] = TensorSource("mag_bias", "F")
        sources |= {"gate_scale": TensorSource("r_mag", "F", np.exp), "gate_bias": TensorSource("gate_bias", "F")}
    return sources
