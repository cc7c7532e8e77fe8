"""Llama Scope (https://huggingface.co/fnlp/Llama-Scope): hyperparams.json and checkpoints/final.safetensors.

The SAEs read activations with an average norm of sqrt(d): x * factor, where factor = sqrt(d) / (the dataset's average
norm). The factor is folded into the weights here. The published threshold applies to features divided by the factor
(`post_process_topk_to_jumprelu_for_inference` in OpenMOSS/Language-Model-SAEs), so it is multiplied by the factor, as
in SAELens since https://github.com/decoderesearch/SAELens/pull/483. As in SAELens, pre-activations are not multiplied
by the norms of the decoder's rows, which are 1 after the authors' processing.
"""

import numpy as np

from pipeline.models.checkpoints.checkpoint_files import Files
from pipeline.models.sae.autoencoder import SAE, TensorSource, check_tensors, divide_by, multiply_by
from pipeline.models.sae.folder import read_config
from pipeline.models.sae.spec import FeatureActivation, SAESpec
from pipeline.models.sae.tensors import SafetensorsTensors

CONFIG, WEIGHTS = "hyperparams.json", "checkpoints/final.safetensors"
# For training only; for `sparsity_include_decoder_norm`, see above.
_HARMLESS = frozenset(
    """
    device seed dtype expansion_factor bias_init_method decoder_exactly_fixed_norm sparsity_include_decoder_norm
    init_decoder_norm init_encoder_norm init_encoder_with_decoder_transpose lp l1_coefficient
    l1_coefficient_warmup_steps top_k k_warmup_steps use_batch_norm_mse use_ghost_grads tp_size ddp_size
    """.split()  # noqa: SIM905 - two lines of words are easier to read than twenty of one
)


def read_sae(files: Files) -> SAE:
    """Reads a JumpReLU SAE or transcoder. b_dec is not subtracted from the input."""
    config = read_config(files, CONFIG)
    config.choice("act_fn", ["jumprelu"])
    config.choice("norm_activation", ["dataset-wise"])
    config.expect("apply_decoder_bias_to_pre_encoder", False)
    config.expect("use_glu_encoder", False)
    has_bias = config.flag("use_decoder_bias", default=True)
    d_in, width = config.positive_int("d_model"), config.positive_int("d_sae")
    threshold = config.positive_float("jump_relu_threshold")
    hook_name, hook_out = config.text("hook_point_in"), config.text("hook_point_out")
    norms = config.nested("dataset_average_activation_norm")
    input_factor, output_factor = (float(np.sqrt(d_in)) / norms.positive_float(end) for end in ("in", "out"))
    norms.finish()
    config.finish(_HARMLESS)
    spec = SAESpec(d_in, width, d_in, FeatureActivation.jumprelu, is_transcoder=hook_name != hook_out)
    sources = {
        "w_enc": TensorSource("encoder.weight", "FD", multiply_by(input_factor)),
        "b_enc": TensorSource("encoder.bias", "F"),
        "threshold": threshold * input_factor,
        "w_dec": TensorSource("decoder.weight", "OF", divide_by(output_factor)),
    }
    if has_bias:
        sources["b_out"] = TensorSource("decoder.bias", "O", divide_by(output_factor))
    return check_tensors(SAE("llama_scope", spec, hook_name, SafetensorsTensors(files, WEIGHTS), sources))
