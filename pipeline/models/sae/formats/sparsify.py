"""EleutherAI's sparsify (https://github.com/EleutherAI/sparsify): cfg.json and sae.safetensors."""

import re

from pipeline.core.errors import CheckpointError
from pipeline.models.checkpoints.checkpoint_files import Files, read_config
from pipeline.models.checkpoints.safetensors_file import SafetensorsFile
from pipeline.models.sae.autoencoder import SAE, TensorSource, check_tensors, coder_sources
from pipeline.models.sae.spec import MODULE_HOOKS, FeatureActivation, SAESpec

CONFIG, WEIGHTS = "cfg.json", "sae.safetensors"
# For training only. `normalize_decoder` was applied before the weights were saved.
_HARMLESS = ("normalize_decoder", "multi_topk", "hook_name", "hook_layer")
_MODULES = {"": "layer", "mlp": "mlp", **dict.fromkeys(("self_attn", "attention", "attn"), "attention")}


def read_sae(files: Files) -> SAE:
    """Reads a TopK SAE or transcoder like `SparseCoder.load_from_disk`: b_dec is subtracted from the input unless
    `transcode` is set. Transcoders older than that attribute do not have it."""
    config = read_config(files, CONFIG, "SAE")
    config.choice("activation", ["topk"], default="topk")
    config.require({"signed": False})  # in the first versions; keeps negative features
    d_in, k = config.positive_int("d_in"), config.positive_int("k", default=32)
    expansion_factor = config.positive_float("expansion_factor", default=32.0)
    width = config.count("num_latents", default=0) or round(d_in * expansion_factor)
    is_transcoder = config.flag("transcode", default=False)
    has_skip = config.flag("skip_connection", default=False)
    config.finish(_HARMLESS)
    if k > width:
        raise CheckpointError(f"{config.where}: k is {k}, expected at most the width {width}. Download it again.")
    spec = SAESpec(d_in, width, d_in, FeatureActivation.topk, k=k, is_transcoder=is_transcoder)
    names = ("encoder.weight", "encoder.bias", "W_dec", "b_dec")
    sources = coder_sources("FD FO", *names, subtracts_bias=not is_transcoder)
    if has_skip:
        sources["w_skip"] = TensorSource("W_skip", "OD")
    hook_name = _hook_name(files.where.rpartition("/")[2], is_transcoder)
    return check_tensors(SAE("sparsify", spec, hook_name, SafetensorsFile(files.open(WEIGHTS)), sources))


def _hook_name(folder: str, is_transcoder: bool) -> str | None:
    """TransformerLens' name of the module that a folder has the name of, such as layers.12 or layers.12.mlp. SAEs read
    its output, transcoders its input."""
    if folder == "embed_tokens":
        return "hook_embed"
    match = re.fullmatch(r"(?:layers|h)\.(\d+)\.?(.*)", folder)
    hooks = MODULE_HOOKS.get(_MODULES.get(match[2], "")) if match else None
    return hooks and f"blocks.{match[1]}.{hooks[0 if is_transcoder else 1]}"
