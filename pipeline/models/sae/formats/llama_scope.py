"""Llama Scope (https://huggingface.co/fnlp/Llama-Scope): hyperparams.json and checkpoints/final.safetensors; and for
DeepSeek-R1-Distill (https://huggingface.co/fnlp/Llama-Scope-R1-Distill): config.json and sae_weights.safetensors.

The SAEs read activations with an average norm of sqrt(d): x * factor, where factor = sqrt(d) / (the dataset's average
norm). The factor is folded into the weights here. Llama Scope's threshold applies to features divided by the factor
(`post_process_topk_to_jumprelu_for_inference` in OpenMOSS/Language-Model-SAEs), so it is multiplied by the factor, as
in SAELens since https://github.com/decoderesearch/SAELens/pull/483; the thresholds of R1-Distill do not.

With `sparsity_include_decoder_norm`, as in the authors' `encode`, a feature fires where its pre-activation, multiplied
by the norm of its decoder row, is above the threshold; its value is the pre-activation. SAELens ignores the attribute,
so it agrees only where the norms are 1. The authors' library made them 1 at the end of training (`train_sae`), and in
R1-Distill's versions only where the attribute is false.
"""

from functools import partial

import numpy as np

from pipeline.models.checkpoints.checkpoint_files import Files, read_config
from pipeline.models.checkpoints.json_config import JsonConfig
from pipeline.models.checkpoints.safetensors_file import SafetensorsFile, TensorFile
from pipeline.models.sae.autoencoder import SAE, TensorSource, check_tensors, coder_sources, read_number
from pipeline.models.sae.spec import FeatureActivation, SAEContext, SAESpec

CONFIG, WEIGHTS = "hyperparams.json", "checkpoints/final.safetensors"
CONFIG_R1, WEIGHTS_R1 = "config.json", "sae_weights.safetensors"
_NORM = "dataset_average_activation_norm"
# For training, or the library's kernels, only.
_HARMLESS = frozenset(
    """
    device seed dtype expansion_factor bias_init_method decoder_exactly_fixed_norm init_decoder_norm
    init_encoder_norm init_encoder_with_decoder_transpose lp l1_coefficient l1_coefficient_warmup_steps top_k
    k_warmup_steps use_batch_norm_mse use_ghost_grads tp_size ddp_size force_unit_decoder_norm
    sae_pretrained_name_or_path strict_loading use_triton_kernel sparsity_threshold_for_triton_spmm_kernel
    sparsity_threshold_for_csr promote_act_fn_dtype jumprelu_threshold_window
    """.split()  # noqa: SIM905 - a few lines of words are easier to read than thirty of one
)


def read_sae(files: Files) -> SAE:
    """Reads a JumpReLU SAE or transcoder of Llama Scope."""
    config = read_config(files, CONFIG, "SAE")
    d_in, width = config.positive_int("d_model"), config.positive_int("d_sae")
    norms = config.nested(_NORM)
    factors = tuple(float(np.sqrt(d_in)) / norms.positive_float(end) for end in ("in", "out"))
    norms.finish()
    threshold = config.positive_float("jump_relu_threshold") * factors[0]
    source = TensorSource("decoder.weight", "OF", partial(_divided_by_norms, threshold))
    return _sae(
        config,
        SafetensorsFile(files.open(WEIGHTS)),
        width=width,
        threshold=source if _includes_norms(config) else threshold,
        factors=factors,
        model_name="meta-llama/Llama-3.1-8B",
    )


def read_sae_r1(files: Files) -> SAE:
    """Reads a JumpReLU SAE or transcoder of Llama Scope for DeepSeek-R1-Distill. The norms are among the tensors."""
    config = read_config(files, CONFIG_R1, "SAE")
    config.choice("sae_type", ["sae"], default="sae")
    d_in = config.positive_int("d_model")
    config.ignore("jump_relu_threshold")  # the tensor has the thresholds
    tensors = SafetensorsFile(files.open(WEIGHTS_R1))
    hook_in = config.text("hook_point_in")
    hooks = hook_in, config.text("hook_point_out") or hook_in

    def divided_threshold(logarithms: np.ndarray) -> np.ndarray:
        return _divided_by_norms(np.exp(logarithms), tensors.read("decoder.weight").astype(np.float32))

    change = divided_threshold if _includes_norms(config) else np.exp
    return _sae(
        config,
        tensors,
        width=round(d_in * config.positive_float("expansion_factor")),
        threshold=TensorSource("log_jumprelu_threshold", "F", change),
        factors=tuple(float(np.sqrt(d_in)) / read_number(tensors, f"{_NORM}.{hook}", 0) for hook in hooks),
        model_name="deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    )


def _includes_norms(config: JsonConfig) -> bool:
    return config.flag("sparsity_include_decoder_norm", default=True)


def _divided_by_norms(threshold: float | np.ndarray, decoder: np.ndarray) -> np.ndarray:
    """Thresholds [F] for pre-activations that are not multiplied by the norms of the decoder's rows. decoder: [O, F]. A
    feature whose row is 0 never fires."""
    norms = np.sqrt(np.einsum("of,of->f", decoder, decoder, dtype=np.float64))
    norms[np.isinf(norms)] = np.nan  # refused later
    never = np.full(norms.shape, float(np.finfo(np.float32).max))
    return np.minimum(np.divide(threshold, norms, out=never.copy(), where=norms != 0), never).astype(np.float32)


def _sae(
    config: JsonConfig,
    tensors: TensorFile,
    *,
    width: int,
    threshold: TensorSource | float,
    factors: tuple[float, float],
    model_name: str,
) -> SAE:
    """factors: of input and output. b_dec is not subtracted from the input."""
    d_in = config.positive_int("d_model")
    config.choice("act_fn", ["jumprelu"])
    config.choice("norm_activation", ["dataset-wise"])
    config.require({"apply_decoder_bias_to_pre_encoder": False, "use_glu_encoder": False})
    has_bias = config.flag("use_decoder_bias", default=True)
    hook_name, hook_out = config.text("hook_point_in"), config.text("hook_point_out")
    config.finish(_HARMLESS)
    names = ("encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias")
    sources = coder_sources("FD OF", *names, factors=factors) | {"threshold": threshold}
    if not has_bias:
        del sources["b_out"]
    is_transcoder = hook_out is not None and hook_name != hook_out
    spec = SAESpec(d_in, width, d_in, FeatureActivation.jumprelu, is_transcoder=is_transcoder)
    context = SAEContext(model_name, context_size=1024, prepend_bos=True)
    norms = [name for name in tensors.shapes if name.startswith(f"{_NORM}.")]
    return check_tensors(SAE("llama_scope", spec, hook_name, tensors, sources, context), norms)
