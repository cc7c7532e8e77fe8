"""SAELens (https://github.com/decoderesearch/SAELens): cfg.json and sae_weights.safetensors, up to version 6.

Interpreted like `SAE.load_from_disk(folder, dtype="float32")`. The `dtype` in cfg.json, in which SAELens would compute,
is ignored.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from pipeline.core.errors import CheckpointError
from pipeline.models.checkpoints.checkpoint_files import Files
from pipeline.models.sae.autoencoder import SAE, TensorSource, check_tensors, divide_by, multiply_by
from pipeline.models.sae.folder import SAEConfig, read_config
from pipeline.models.sae.spec import FeatureActivation, InputScaling, SAESpec
from pipeline.models.sae.tensors import SafetensorsTensors

CONFIG, WEIGHTS, SCALER = "cfg.json", "sae_weights.safetensors", "activation_scaler.json"
_ARCHITECTURES = {
    "standard": FeatureActivation.relu,
    "gated": FeatureActivation.gated,
    "topk": FeatureActivation.topk,
    "jumprelu": FeatureActivation.jumprelu,
    "transcoder": FeatureActivation.relu,
    "skip_transcoder": FeatureActivation.relu,
    "jumprelu_transcoder": FeatureActivation.jumprelu,
    "jumprelu_skip_transcoder": FeatureActivation.jumprelu,
}
_AVERAGE = "expected_average_only_in"
_SCALINGS = {
    "none": InputScaling.none,
    "constant_norm_rescale": InputScaling.constant_norm,
    "layer_norm": InputScaling.layer_norm,
    _AVERAGE: InputScaling.none,
}
_FEATURE_SCALES = ("scaling_factor", "finetuning_scaling_factor")  # before version 6: scales of the decoder's input
# Attributes about the model, the data and training, from all versions.
_HARMLESS = frozenset(
    """
    device dtype metadata model_name model_class_name model_kwargs model_from_pretrained_kwargs hook_layer hook_eval
    hook_point_layer hook_point_eval hook_name_out hook_head_index_out hf_hook_name hf_hook_name_out layer
    dataset_path dataset_trust_remote_code streaming is_dataset_tokenized context_size prepend_bos seqpos_slice
    exclude_special_tokens neuronpedia_id sae_lens_version sae_lens_training_version use_cached_activations
    cached_activations_path from_pretrained_path expansion_factor b_dec_init_method noise_scale normalize_sae_decoder
    decoder_orthogonal_init decoder_heuristic_init decoder_heuristic_init_norm decoder_init_norm
    init_encoder_as_decoder_transpose n_batches_in_buffer training_tokens total_training_tokens total_training_steps
    finetuning_tokens finetuning_method finetuning_scaling_factor store_batch_size store_batch_size_prompts
    train_batch_size train_batch_size_tokens tokens_per_buffer seed autocast autocast_lm autocast_sae compile_llm
    llm_compilation_mode compile_sae sae_compilation_mode adam_beta1 adam_beta2 mse_loss_normalization l1_coefficient
    lp_norm scale_sparsity_penalty_by_decoder_norm l1_warm_up_steps lr lr_scheduler_name lr_warm_up_steps lr_end
    lr_decay_steps n_restart_cycles use_ghost_grads feature_sampling_window dead_feature_window dead_feature_threshold
    dead_feature_estimation_method feature_reinit_scale feature_resampling_method resample_batches n_eval_batches
    eval_batch_size_prompts eval_every_n_wandb_logs log_to_wandb log_activations_store_to_wandb
    log_optimizer_state_to_wandb log_weights_to_wandb wandb_project wandb_id wandb_entity wandb_log_frequency run_name
    resume resume_run n_checkpoints checkpoint_path verbose act_store_device normalize_activations_in_store
    jumprelu_init_threshold jumprelu_bandwidth jumprelu_sparsity_loss_mode jumprelu_ste_to_input jumprelu_tanh_scale
    l0_coefficient l0_warm_up_steps pre_act_loss_coefficient target_l0 use_sparse_activations aux_loss_coefficient
    """.split()  # noqa: SIM905 - twenty lines of words are easier to read than a hundred of one
)


def read_sae(files: Files) -> SAE:
    """Reads an SAE or transcoder with one of the architectures in `_ARCHITECTURES`."""
    config = read_config(files, CONFIG)
    architecture = _architecture(config)
    is_transcoder = architecture.endswith("transcoder")
    d_in, width = config.positive_int("d_in"), config.positive_int("d_sae")
    spec = SAESpec(
        d_in,
        width,
        d_out=config.positive_int("d_out") if is_transcoder else config.positive_int("d_out", default=d_in),
        activation=_ARCHITECTURES[architecture],
        is_transcoder=is_transcoder,
    )
    spec = replace(spec, k=_top_k(config, spec))
    normalisation = _normalisation(config)
    scaling = _SCALINGS[normalisation]
    spec = replace(spec, input_scaling=scaling, undo_scaling=scaling is not InputScaling.none and not is_transcoder)
    subtracts_bias = config.flag("apply_b_dec_to_input", default=True)
    if (is_transcoder and subtracts_bias) or (not is_transcoder and spec.d_out != d_in):
        raise CheckpointError(
            f"{config.where}: architecture is {architecture}, d_in is {d_in}, d_out is {spec.d_out} and "
            f"apply_b_dec_to_input is {str(subtracts_bias).lower()}: expected d_out equal to d_in, or a transcoder "
            f"with apply_b_dec_to_input false. Save it again with SAELens."
        )
    has_decoder_norms = spec.activation is FeatureActivation.topk and config.flag("rescale_acts_by_decoder_norm", False)
    config.expect("rescale_acts_by_decoder_norm", has_decoder_norms)
    hook_name = _hook_name(config)
    config.finish(_HARMLESS)
    factor = _input_factor(files, config.where) if normalisation == _AVERAGE else None
    sources = _sources(spec, subtracts_bias, "skip" in architecture, factor)
    if has_decoder_norms:
        sources["feature_scale"] = TensorSource("W_dec", "FO", partial(_row_norms, factor))
    tensors = SafetensorsTensors(files, WEIGHTS)
    return check_tensors(SAE("saelens", spec, hook_name, tensors, sources), _neutral_scales(tensors))


def _architecture(config: SAEConfig) -> str:
    """The architecture. Before version 6, topk was not an architecture but an activation function."""
    architecture = config.choice(
        "architecture",
        _ARCHITECTURES,
        default="standard",
        remedy="Save a batchtopk SAE with save_inference_model, which makes it jumprelu; otherwise, use another SAE.",
    )
    functions = ["relu", "topk"] if architecture in ("standard", "topk") else ["relu"]
    chosen = [config.choice(key, functions, "relu") for key in ("activation_fn", "activation_fn_str")]
    return "topk" if "topk" in chosen else architecture


def _top_k(config: SAEConfig, spec: SAESpec) -> int | None:
    old = config.nested("activation_fn_kwargs")
    old.expect("signed", False)
    k = None
    if spec.activation is FeatureActivation.topk:
        k = (old if "k" in old else config).positive_int("k")
        config.expect("k", k)
        if k > spec.width:
            raise CheckpointError(f"{config.where}: k is {k}, expected at most d_sae, {spec.width}. Download it again.")
    old.finish()
    return k


def _normalisation(config: SAEConfig) -> str:
    """How activations are scaled. Before version 3, this was a bool."""
    if isinstance(config.values.get("normalize_activations"), bool):
        return _AVERAGE if config.flag("normalize_activations", default=False) else "none"
    return config.choice("normalize_activations", _SCALINGS, default="none")


def _hook_name(config: SAEConfig) -> str | None:
    """The hook that the SAE was trained on. Refuses SAEs of a single head, and SAEs for which SAELens concatenates
    heads."""
    sections = [config.nested("metadata"), config]
    for section in sections:
        for key in ("hook_head_index", "hook_point_head_index"):
            section.expect(key, None)
    names = [section.text(key) for section in sections for key in ("hook_name", "hook_point")]
    hook_name = next((name for name in names if name is not None), None)
    if "reshape_activations" not in config and "hook_z" in (hook_name or ""):
        raise CheckpointError(
            f"{config.where} is for {hook_name}, whose heads SAELens versions before 6 concatenated: expected an SAE "
            f"that does not reshape activations. If the site's heads are already concatenated, set "
            f"reshape_activations to none."
        )
    config.expect("reshape_activations", "none")
    for section in sections:
        for key in ("model_kwargs", "model_from_pretrained_kwargs"):
            processing = section.nested(key)
            for name in ("center_writing_weights", "fold_ln", "center_unembed", "fold_value_biases"):
                processing.expect(name, False)
    return hook_name


def _input_factor(files: Files, where: str) -> float:
    """The activations' scaling factor, which SAELens estimates, saves with checkpoints, and folds into the weights at
    the end of training."""
    if not files.has(SCALER):
        raise CheckpointError(
            f"{where}: normalize_activations is {_AVERAGE}, but there is no {SCALER} with the scaling factor. Fold it "
            f"in with SAELens: sae.fold_activation_norm_scaling_factor(factor); sae.save_model(folder)."
        )
    return read_config(files, SCALER).positive_float("scaling_factor")


def _sources(
    spec: SAESpec, subtracts_bias: bool, has_skip: bool, input_factor: float | None
) -> dict[str, TensorSource | float]:
    """The sources of all arrays. `input_factor` is folded like in `fold_activation_norm_scaling_factor`."""
    scale = None if input_factor is None else multiply_by(input_factor)
    unscale = None if input_factor is None else divide_by(input_factor)
    sources: dict[str, TensorSource | float] = {
        "w_enc": TensorSource("W_enc", "DF", scale),
        "b_enc": TensorSource("b_mag" if spec.activation is FeatureActivation.gated else "b_enc", "F"),
        "w_dec": TensorSource("W_dec", "FO", unscale),
        "b_out": TensorSource("b_dec", "O", unscale),
    }
    if subtracts_bias:
        sources["b_in"] = TensorSource("b_dec", "D", unscale)
    if spec.activation is FeatureActivation.jumprelu:
        sources["threshold"] = TensorSource("threshold", "F")
    if spec.activation is FeatureActivation.gated:
        sources |= {"gate_scale": TensorSource("r_mag", "F", np.exp), "gate_bias": TensorSource("b_gate", "F")}
    if has_skip:
        sources["w_skip"] = TensorSource("W_skip", "OD")
    return sources


def _row_norms(input_factor: float | None, values: np.ndarray) -> np.ndarray:
    squares = np.einsum("fo,fo->f", values, values, dtype=np.float64)
    return (np.sqrt(squares) / (input_factor or 1)).astype(np.float32)


def _neutral_scales(tensors: SafetensorsTensors) -> list[str]:
    """The names of feature scales that some versions save although all of them are 1."""
    scales = [name for name in _FEATURE_SCALES if name in tensors.shapes]
    return [name for name in scales if tensors.shapes[name] and np.allclose(tensors.read(name), 1)]
