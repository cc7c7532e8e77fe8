"""Gemma Scope (https://huggingface.co/google/gemma-scope): params.npz, without a configuration file."""

from pipeline.core.errors import CheckpointError
from pipeline.core.json_text import shown
from pipeline.models.checkpoints.checkpoint_files import Files
from pipeline.models.sae.autoencoder import SAE, Source, check_tensors
from pipeline.models.sae.folder import open_file
from pipeline.models.sae.npz_file import NpzFile
from pipeline.models.sae.spec import Activation, SAESpec

WEIGHTS = "params.npz"


def read_sae(files: Files) -> SAE:
    """Reads a JumpReLU SAE or transcoder; the file does not say which. b_dec is not subtracted from the input."""
    if "embedding" in files.where.split("/"):
        raise CheckpointError(
            f"{files.where} is an SAE for the rows of Gemma's embedding matrix, expected an SAE for a layer: "
            f"activations are sqrt(d) times as large. Save it in SAELens's format, with W_enc divided by sqrt(d), and "
            f"W_dec and b_dec multiplied by sqrt(d)."
        )
    tensors = NpzFile(open_file(files, WEIGHTS))
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
        activation=Activation.jumprelu,
        is_transcoder=None,
    )
    sources = {
        "w_enc": Source("W_enc", "DF"),
        "b_enc": Source("b_enc", "F"),
        "threshold": Source("threshold", "F"),
        "w_dec": Source("W_dec", "FO"),
        "b_out": Source("b_dec", "O"),
    }
    return check_tensors(SAE("gemma_scope", spec, None, tensors, sources))
