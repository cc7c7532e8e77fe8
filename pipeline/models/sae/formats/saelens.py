"""SAELens (https://github.com/decoderesearch/SAELens): cfg.json and sae_weights.safetensors, up to version 6.

Interpreted like `SAE.load_from_disk(folder, dtype="float32")`. The `dtype` in cfg.json, in which SAELens would compute,
is ignored. What SAELens' registry of published SAEs (pretrained_saes.yaml) adds to the files of a repository is in
`_PUBLISHED`.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import numpy as np

from pipeline.core.errors import CheckpointError
from pipeline.models.checkpoints.checkpoint_files import Files, read_config
from pipeline.models.checkpoints.json_config import JsonConfig
from pipeline.models.checkpoints.safetensors_file import SafetensorsFile
from pipeline.models.sae.autoencoder import SAE, Sources, TensorSource, check_tensors, coder_sources
from pipeline.models.sae.spec import FeatureActivation, InputScaling, SAEContext, SAESpec, hook_of_module

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
_IN_TRAINING = ("batchtopk", "matryoshka_batchtopk")
_AVERAGE = "expected_average_only_in"
_SCALINGS = {
    "none": InputScaling.none,
    "constant_norm_rescale": InputScaling.constant_norm,
    "layer_norm": InputScaling.layer_norm,
    _AVERAGE: InputScaling.none,
}
_CENTRED = "center_writing_weights"
_STREAM_HOOKS = r"hook_(embed|pos_embed|resid_pre|resid_mid|resid_post|attn_out|mlp_out|attn_in|mlp_in)$"
_CENTRED_MODEL = MappingProxyType({"model_from_pretrained_kwargs": {_CENTRED: True}})
_PUBLISHED: Mapping[str, Mapping[str, object]] = {
    "jbloom/GPT2-Small-SAEs-Reformatted": _CENTRED_MODEL,
    "jbloom/GPT2-Small-Feature-Splitting-Experiment-Layer-8": _CENTRED_MODEL,
    "tommmcgrath/gpt2-small-mlp-out-saes": _CENTRED_MODEL,
    "JoshEngels/Mistral-7B-Residual-Stream-SAEs": {"normalize_activations": "constant_norm_rescale"},
}
_PUBLISHED_FACTORS: Mapping[str, Mapping[int, float]] = {  # by layer, of activations with normalize_activations
    "tommmcgrath/gpt2-small-mlp-out-saes": dict(
        enumerate(
            [
                *(1.049317316132615, 2.3693984005104283, 1.6411934982190302, 1.8958522157897557, 1.81673478700627),
                *(1.550234472245924, 1.3237742807210804, 1.1042905114723296, 0.9123762783479742, 0.6955335635232373),
                *(0.3619728926727644, 0.2851548652550073),
            ]
        )
    ),
    "jbloom/Gemma-2b-Residual-Stream-SAEs": {12: 0.21381938399317255},
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
    disable_concat_sequences sequence_separator_token
    """.split()  # noqa: SIM905 - twenty lines of words are easier to read than a hundred of one
)


def read_sae(files: Files) -> SAE:
    """Reads an SAE or transcoder with one of the architectures in `_ARCHITECTURES`."""
    config = read_config(files, CONFIG, "SAE")
    config.values |= _published(_PUBLISHED, files) or {}
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
    hook_name, is_centred = _hook_name(config), _is_centred(config)
    is_centred = is_centred and re.search(_STREAM_HOOKS, hook_name or "") is not None
    scaling = _SCALINGS[normalisation]
    if is_centred and scaling is InputScaling.none:
        scaling = InputScaling.centred
    elif is_centred and scaling is not InputScaling.layer_norm:  # which also subtracts the mean
        raise CheckpointError(
            f"{config.where}: {_CENTRED} is True and normalize_activations is {normalisation}, which is not "
            f"implemented together. Use another SAE."
        )
    spec = replace(spec, input_scaling=scaling, undo_scaling=scaling is not InputScaling.none and not is_transcoder)
    subtracts_bias = config.flag("apply_b_dec_to_input", default=True)
    if (is_transcoder and subtracts_bias) or (not is_transcoder and spec.d_out != d_in):
        raise CheckpointError(
            f"{config.where}: architecture is {architecture}, d_in is {d_in}, d_out is {spec.d_out} and "
            f"apply_b_dec_to_input is {str(subtracts_bias).lower()}: expected d_out equal to d_in, or a transcoder "
            f"with apply_b_dec_to_input false. Save it again with SAELens."
        )
    has_decoder_norms = spec.activation is FeatureActivation.topk and config.flag("rescale_acts_by_decoder_norm", False)
    config.require({"rescale_acts_by_decoder_norm": has_decoder_norms})
    config.finish(_HARMLESS)
    factor = _input_factor(files, config.where, hook_name) if normalisation == _AVERAGE else None
    sources = _sources(spec, subtracts_bias, "skip" in architecture, factor)
    if has_decoder_norms:
        sources["feature_scale"] = TensorSource("W_dec", "FO", partial(_row_norms, factor))
    tensors = SafetensorsFile(files.open(WEIGHTS))
    sae = SAE("saelens", spec, hook_name, tensors, sources, _context(config))
    return check_tensors(sae, _neutral_scales(tensors))


def _published(table: Mapping[str, Mapping], files: Files) -> Mapping | None:
    """The entry of the repository that the address names, on the Hub or in its cache."""
    names = (name for name in table if name in files.where or name.replace("/", "--") in files.where)
    return next((table[name] for name in names), None)


def _architecture(config: JsonConfig) -> str:
    """The architecture. Before version 6, topk was not an architecture but an activation function."""
    is_in_training = config.values.get("architecture") in _IN_TRAINING
    remedy = "Save it with save_inference_model, which makes it jumprelu." if is_in_training else ""
    architecture = config.choice("architecture", _ARCHITECTURES, "standard", remedy)
    functions = ["relu", "topk"] if architecture in ("standard", "topk") else ["relu"]
    chosen = [config.choice(key, functions, "relu") for key in ("activation_fn", "activation_fn_str")]
    return "topk" if "topk" in chosen else architecture


def _top_k(config: JsonConfig, spec: SAESpec) -> int | None:
    old = config.nested("activation_fn_kwargs")
    old.require({"signed": False})
    k = None
    if spec.activation is FeatureActivation.topk:
        k = (old if "k" in old else config).positive_int("k")
        config.require({"k": k})
        if k > spec.width:
            raise CheckpointError(f"{config.where}: k is {k}, expected at most d_sae, {spec.width}. Download it again.")
    old.finish()
    return k


def _normalisation(config: JsonConfig) -> str:
    """How activations are scaled. Before version 3, this was a bool."""
    if isinstance(config.values.get("normalize_activations"), bool):
        return _AVERAGE if config.flag("normalize_activations", default=False) else "none"
    remedy = "Fold the whitening in with SAELens: sae.fold_activation_whitening(...); sae.save_model(folder)."
    is_whitened = config.values.get("normalize_activations") == "covariance_whitening"
    return config.choice("normalize_activations", _SCALINGS, "none", remedy if is_whitened else "")


def _hook_name(config: JsonConfig) -> str | None:
    """The hook that the SAE was trained on. `hook_z` is read with its heads concatenated, as the site attn_z has them.
    Refuses SAEs of a single head."""
    sections = [config.nested("metadata"), config]
    for section in sections:
        section.require({"hook_head_index": None, "hook_point_head_index": None})
    names = [section.text(key) for section in sections for key in ("hook_name", "hook_point")]
    hook_name = next((name for name in names if name is not None), None)
    concatenates = config.choice("reshape_activations", ["none", "hook_z"], "none") == "hook_z"
    if concatenates and not (hook_name or "_z").endswith("_z"):
        raise CheckpointError(
            f"{config.where}: reshape_activations is hook_z, but the SAE is for {hook_name}, expected a hook_z. Save "
            f"it again with SAELens."
        )
    return hook_of_module(sections[0].text("hf_hook_name")) or hook_name


def _is_centred(config: JsonConfig) -> bool:
    """Whether the model's weights were changed so that what is written into the residual stream has a mean of 0:
    TransformerLens' default for models with LayerNorm."""
    values = []
    for section in (config.nested("metadata"), config):
        for key in ("model_kwargs", "model_from_pretrained_kwargs"):
            processing = section.nested(key)
            values.append(processing.flag(_CENTRED, default=False))
            processing.require(dict.fromkeys(("fold_ln", "center_unembed", "fold_value_biases"), False))
    return any(values)


def _context(config: JsonConfig) -> SAEContext:
    """What the configuration says of the activations; not checked, since they do not change the features."""
    values = {**config.values, **config.nested("metadata").values}

    def known(key: str, *kinds: type) -> object:
        value = values.get(key)
        return value if type(value) in kinds else None

    whole = known("disable_concat_sequences", bool)
    if whole is None and "metadata" not in config and "sae_lens_training_version" in config:
        whole = False  # versions before 6 do not record it
    excluded, positions = known("exclude_special_tokens", bool, list), known("seqpos_slice", list)
    return SAEContext(
        model_name=known("model_name", str),
        context_size=known("context_size", int),
        prepend_bos=known("prepend_bos", bool),
        separator=known("sequence_separator_token", str, int),
        concatenates=None if whole is None else not whole,
        excluded_tokens=tuple(excluded) if isinstance(excluded, list) else excluded,
        positions=None if positions is None else tuple(positions),
    )


def _input_factor(files: Files, where: str, hook_name: str | None) -> float:
    """The activations' scaling factor, which SAELens estimates, saves with checkpoints, and folds into the weights at
    the end of training."""
    layer = re.match(r"blocks\.(\d+)\.", hook_name or "")
    factor = (_published(_PUBLISHED_FACTORS, files) or {}).get(int(layer[1])) if layer else None
    if factor is None and not files.has(SCALER):
        raise CheckpointError(
            f"{where}: normalize_activations is {_AVERAGE}, but there is no {SCALER} with the scaling factor. Fold it "
            f"in with SAELens: sae.fold_activation_norm_scaling_factor(factor); sae.save_model(folder)."
        )
    return factor or read_config(files, SCALER, "SAE").positive_float("scaling_factor")


def _sources(spec: SAESpec, subtracts_bias: bool, has_skip: bool, factor: float | None) -> Sources:
    """The sources of all arrays. `factor` of inputs and outputs is folded in."""
    b_enc = "b_mag" if spec.activation is FeatureActivation.gated else "b_enc"
    factors = None if factor is None else (factor, factor)
    sources = coder_sources("DF FO", "W_enc", b_enc, "W_dec", "b_dec", subtracts_bias=subtracts_bias, factors=factors)
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


def _neutral_scales(tensors: SafetensorsFile) -> list[str]:
    """The names of feature scales that some versions save although all of them are 1."""
    scales = [name for name in _FEATURE_SCALES if name in tensors.shapes]
    return [name for name in scales if tensors.shapes[name] and np.allclose(tensors.read(name), 1)]
