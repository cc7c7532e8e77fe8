"""Gemma Scope (https://huggingface.co/google/gemma-scope): params.npz, without a configuration file; and Gemma Scope 2
(https://huggingface.co/google/gemma-scope-2): config.json and params.safetensors.

All are JumpReLU SAEs or transcoders. b_dec is not subtracted from the input.
"""

from pipeline.core.errors import CheckpointError
from pipeline.core.messages import shown
from pipeline.models.checkpoints.checkpoint_files import Files
from pipeline.models.sae.autoencoder import SAE, TensorSource, check_tensors
from pipeline.models.sae.folder import read_config
from pipeline.models.sae.npz_file import NpzFile
from pipeline.models.sae.spec import FeatureActivation, SAESpec
from pipeline.models.sae.tensors import SafetensorsTensors

WEIGHTS = "params.npz"
CONFIG_2, WEIGHTS_2 = "config.json", "params.safetensors"
_HARMLESS = ("model_name", "l0", "hf_hook_point_out")


def read_sae(files: Files) -> SAE:
    """Reads an SAE or transcoder; the file does not say which."""
    if "embedding" in files.where.split("/"):
        raise CheckpointError(
            f"{files.where} is an SAE for the rows of Gemma's embedding matrix, expected an SAE for a layer: "
            f"activations are sqrt(d) times as large. Save it in SAELens's format, with W_enc divided by sqrt(d), and "
            f"W_dec and b_dec multiplied by sqrt(d)."
        )
    tensors = NpzFile(files.open(WEIGHTS))
    width = tensors.shapes.get("b_enc", ())
    d_in = tensors.shapes.get("W_enc", ())
    d_out = tensors.shapes.get("b_dec", ())
    if not (len(width) == len(d_out) == 1 and len(d_in) == 2):
        raise CheckpointError(
            f"{tensors.name}: expected W_enc with two axes, b_enc and b_dec with one, got "
            f"{shown(dict(tensors.shapes))}. Is the file from Gemma Scope?"
        )
    is_transposed = d_in[0] == width[0] != d_in[1]
    spec = SAESpec(
        d_in=d_in[1] if is_transposed else d_in[0],
        width=width[0],
        d_out=d_out[0],
        activation=FeatureActivation.jumprelu,
        is_transcoder=None,
    )
    return check_tensors(SAE("gemma_scope", spec, None, tensors, _sources("W_enc", "W_dec")))


def read_sae_2(files: Files) -> SAE:
    """Reads an SAE or transcoder, with or without a skip connection."""
    config = read_config(files, CONFIG_2)
    config.choice("architecture", ["jump_relu"])
    kind = config.choice("type", ["sae", "transcoder"], default="sae")
    has_skip = config.flag("affine_connection", default=False)
    width, hook_name = config.positive_int("width"), config.text("hf_hook_point_in")
    config.finish(_HARMLESS)
    tensors = SafetensorsTensors(files, WEIGHTS_2)
    d_in, d_out = (next(iter(tensors.shapes.get(name, ())), 0) for name in ("w_enc", "b_dec"))
    spec = SAESpec(d_in, width, d_out, FeatureActivation.jumprelu, is_transcoder=kind == "transcoder")
    sources = _sources("w_enc", "w_dec")
    if has_skip:
        sources["w_skip"] = TensorSource("affine_skip_connection", "DO")
    return check_tensors(SAE("gemma_scope_2", spec, hook_name, tensors, sources))


def _sources(encoder: str, decoder: str) -> dict[str, TensorSource]:
    return {
        "w_enc": TensorSource(encoder, "DF"),
        "b_enc": TensorSource("b_enc", "F"),
        "threshold": TensorSource("threshold", "F"),
        "w_dec": TensorSource(decoder, "FO"),
        "b_out": TensorSource("b_dec", "O"),
    }
