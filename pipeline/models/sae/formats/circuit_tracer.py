"""Transcoders for circuit-tracer (https://github.com/safety-research/circuit-tracer), all layers in one folder:
layer_5.safetensors with a transcoder, or W_enc_5.safetensors with what a cross-layer transcoder reads from a layer.
config.yaml, which some folders lack, has the model and the hooks.

Published in this format: mwhanna/qwen3-4b-transcoders and its like, mntss/transcoder-Llama-3.2-1B,
mntss/clt-gemma-2-2b-2.5M.
"""

import re
from collections.abc import Mapping

from pipeline.core.errors import CheckpointError
from pipeline.core.messages import shown
from pipeline.models.checkpoints.checkpoint_files import Files
from pipeline.models.checkpoints.json_config import JsonConfig
from pipeline.models.checkpoints.safetensors_file import SafetensorsFile
from pipeline.models.sae.autoencoder import SAE, TensorSource, axis_sizes, check_tensors, coder_sources
from pipeline.models.sae.spec import FeatureActivation, SAEContext, SAESpec

CONFIG, _KEYS = "config.yaml", ("model_name", "feature_input_hook", "activation")
TRANSCODER, CROSS_LAYER = r"layer_(\d+)\.safetensors", r"W_enc_(\d+)\.safetensors"
_MAX_YAML = 64 << 10  # bytes
_SCALAR = re.compile(r"""'([^']*)'|"([^"\\]*)"|([^][{}&*!|>'"%@`,?:\s-](?:[^:]|:(?=\S))*|~|)""")  # YAML without escapes
_NULLS = ("", "~", "null", "Null", "NULL")
_THRESHOLD = "activation_function.threshold"
_HOOK = "mlp.hook_in"  # of transcoders in folders without config.yaml, as in SAELens
_ACTIVATIONS = {"relu": FeatureActivation.relu, "jump_relu": FeatureActivation.jumprelu}


def read_transcoder(files: Files, name: str) -> SAE:
    """Reads a transcoder with or without thresholds (otherwise ReLU) and a skip connection."""
    tensors = SafetensorsFile(files.open(name))
    sizes = axis_sizes(tensors, {"W_enc": "FD", "b_dec": "O"})
    sources = coder_sources("FD FO", "W_enc", "b_enc", "W_dec", "b_dec")
    if _THRESHOLD in tensors.shapes:
        sources["threshold"] = TensorSource(_THRESHOLD, "F")
    if "W_skip" in tensors.shapes:
        sources["w_skip"] = TensorSource("W_skip", "OD")
    return _sae(files, re.fullmatch(TRANSCODER, name)[1], sizes, tensors, sources, _HOOK)


def read_cross_layer(files: Files, name: str) -> SAE:
    """Reads the encoder of one layer. Its features write to this layer and all later ones: there is no decoder here."""
    layer = re.fullmatch(CROSS_LAYER, name)[1]
    tensors = SafetensorsFile(files.open(name))
    sizes = axis_sizes(tensors, {f"W_enc_{layer}": "FD", f"b_dec_{layer}": "O"})
    sources = {"w_enc": TensorSource(f"W_enc_{layer}", "FD"), "b_enc": TensorSource(f"b_enc_{layer}", "F")}
    if (threshold := f"threshold_{layer}") in tensors.shapes:
        sources["threshold"] = TensorSource(threshold, "F")
    return _sae(files, layer, sizes, tensors, sources, None)


def _sae(
    files: Files,
    layer: str,
    sizes: Mapping[str, int],
    tensors: SafetensorsFile,
    sources: Mapping[str, TensorSource],
    hook: str | None,
) -> SAE:
    """hook: that of a folder whose configuration does not name it; None: not known."""
    config = _read_yaml(files)
    activation = "jump_relu" if "threshold" in sources else "relu"
    config.choice(
        *("activation", [activation], activation),
        remedy=f"{tensors.name} has {'' if 'threshold' in sources else 'no '}thresholds. Use another transcoder.",
    )
    size = re.search(r"(?:/|--)qwen3-([\d.]+b)-transcoders", files.where)  # of the folders without config.yaml
    model_name = config.text("model_name") or (f"Qwen/Qwen3-{size[1].upper()}" if size else None)
    hook = config.text("feature_input_hook") or hook
    spec = SAESpec(sizes["D"], sizes["F"], sizes["O"], _ACTIVATIONS[activation], is_transcoder=True)
    hook_name = hook and f"blocks.{layer}.{hook}"
    sae = SAE("circuit_tracer", spec, hook_name, tensors, sources, SAEContext(model_name))
    return check_tensors(sae, [f"b_dec_{layer}"])


def _read_yaml(files: Files) -> JsonConfig:
    """Reads the strings that config.yaml, if the folder has one, has for `_KEYS`, each on one line; null is absent.
    Other keys are ignored. A YAML parser would take minutes for some small files.

    Raises CheckpointError if the file is damaged, or writes these keys in another way."""
    if not files.has(CONFIG):
        return JsonConfig({}, f"{files.where}/{CONFIG}", "SAE")
    source, values = files.open(CONFIG), {}
    if source.size > _MAX_YAML:
        raise CheckpointError(
            f"{source.name} has {source.size:,} bytes, expected at most {_MAX_YAML:,}. Download it again."
        )
    lines = source.read(0, source.size).tobytes().decode("utf-8-sig", errors="replace").split("\n")
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        key, colon, value = line.partition(":")
        if colon and key in _KEYS:
            scalar = _SCALAR.fullmatch(value.partition(" #")[0].strip())
            goes_on = following.startswith((" ", "\t", "- "))
            if scalar is None or key in values or goes_on:
                raise CheckpointError(
                    f"{source.name}: expected one string on the line of {key}, got {shown(value.strip())}. Download it "
                    f"again."
                )
            text = next((group for group in scalar.groups() if group is not None), "")
            values[key] = None if text in _NULLS else text
    return JsonConfig(values, source.name, "SAE")
