"""Gemma Scope 2 (https://huggingface.co/google/gemma-scope-2): config.json and params.safetensors."""

from pipeline.models.checkpoints.checkpoint_files import Files
from pipeline.models.sae.autoencoder import SAE, Source, check_tensors
from pipeline.models.sae.folder import read_config
from pipeline.models.sae.spec import Activation, SAESpec
from pipeline.models.sae.tensors import SafetensorsTensors

CONFIG, WEIGHTS = "config.json", "params.safetensors"
_HARMLESS = ("model_name", "l0", "hf_hook_point_out")


def read_sae(files: Files) -> SAE:
    """Reads a JumpReLU SAE or transcoder, with or without a skip connection. b_dec is not subtracted from the input."""
    config = read_config(files, CONFIG)
    config.choice("architecture", ["jump_relu"])
    kind = config.choice("type", ["sae", "transcoder"], default="sae")
    has_skip = config.flag("affine_connection", default=False)
    width, hook_name = config.positive_int("width"), config.text("hf_hook_point_in")
    config.finish(_HARMLESS)
    tensors = SafetensorsTensors(files, WEIGHTS)
    d_in, d_out = (next(iter(tensors.shapes.get(name, ())), 0) for name in ("w_enc", "b_dec"))
    spec = SAESpec(d_in, width, d_out, Activation.jumprelu, is_transcoder=kind == "transcoder")
    sources = {
        "w_enc": Source("w_enc", "DF"),
        "b_enc": Source("b_enc", "F"),
        "threshold": Source("threshold", "F"),
        "w_dec": Source("w_dec", "FO"),
        "b_out": Source("b_dec", "O"),
    }
    if has_skip:
        sources["w_skip"] = Source("affine_skip_connection", "DO")
    return check_tensors(SAE("gemma_scope_2", spec, hook_name, tensors, sources))
