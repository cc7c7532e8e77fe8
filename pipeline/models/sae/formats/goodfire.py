"""Goodfire's SAEs for Llama (https://huggingface.co/Goodfire), and that of qresearch for DeepSeek-R1-Distill-Llama: a
file such as Llama-3.1-8B-Instruct-SAE-l19.pth, whose name has the model and the layer."""

import re

from pipeline.models.checkpoints.checkpoint_files import Files
from pipeline.models.checkpoints.torch_file import TorchFile
from pipeline.models.sae.autoencoder import SAE, axis_sizes, check_tensors, coder_sources
from pipeline.models.sae.spec import FeatureActivation, SAEContext, SAESpec

WEIGHTS = r"(.+)-SAE-l(\d+)\.pth?"


def read_sae(files: Files, name: str) -> SAE:
    """Reads a ReLU SAE of the residual stream, made of two torch.nn.Linear. No bias is subtracted from the input."""
    tensors = TorchFile(files.open(name))
    linear = "_linear" if "encoder_linear.weight" in tensors.shapes else ""
    names = [f"{coder}coder{linear}.{kind}" for coder in ("en", "de") for kind in ("weight", "bias")]
    sizes, sources = axis_sizes(tensors, {names[0]: "FD"}), coder_sources("FD OF", *names)
    model_name, layer = re.fullmatch(WEIGHTS, name).groups()
    spec = SAESpec(sizes["D"], sizes["F"], sizes["D"], FeatureActivation.relu)
    hook_name = f"blocks.{layer}.hook_resid_post"
    return check_tensors(SAE("goodfire", spec, hook_name, tensors, sources, SAEContext(model_name)))
