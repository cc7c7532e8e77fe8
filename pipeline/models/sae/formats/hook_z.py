"""Attention SAEs of Kissane and others (https://huggingface.co/ckkissane): NAME.pt and NAME_cfg.json, all layers in one
folder, such as gpt2-small_L0_Hcat_z_lr1.20e-03_..._v9.pt. They read the concatenated outputs of a layer's heads, as
TransformerLens' GPT-2 computes them: without biases (`pipeline/planning/encoders.py`)."""

from pipeline.models.checkpoints.checkpoint_files import Files, read_config
from pipeline.models.checkpoints.torch_file import TorchFile
from pipeline.models.sae.autoencoder import SAE, check_tensors, coder_sources
from pipeline.models.sae.spec import FeatureActivation, SAEContext, SAESpec

FORMAT, WEIGHTS = "hook_z", r".+_Hcat_z_.+\.pt"


def read_sae(files: Files, name: str) -> SAE:
    """Reads a ReLU SAE; b_dec is subtracted from the input. Attributes that are not read here are about training."""
    config = read_config(files, f"{name.removesuffix('.pt')}_cfg.json", "SAE")
    d_in, width = config.positive_int("act_size"), config.positive_int("dict_size")
    context = SAEContext(
        config.text("model_name"), context_size=config.positive_int("seq_len", default=128), prepend_bos=True
    )
    sources = coder_sources("DF FO", "W_enc", "b_enc", "W_dec", "b_dec", subtracts_bias=True)
    spec = SAESpec(d_in, width, d_in, FeatureActivation.relu)
    return check_tensors(SAE(FORMAT, spec, config.text("act_name"), TorchFile(files.open(name)), sources, context))
