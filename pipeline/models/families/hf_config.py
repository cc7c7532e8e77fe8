"""A reader of config.json that accounts for every attribute.

An attribute is either read by the family, or known to have no effect, or has the value that disables it. Any other
attribute stops the program before weights are loaded.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from pipeline.core.errors import CheckpointError
from pipeline.core.messages import shown
from pipeline.models.architecture import Activation, Architecture, KeyTable
from pipeline.models.checkpoints.json_config import REQUIRED, JsonConfig

_UNQUANTISED = "Use the checkpoint from which it was quantised."
_MAX_LAYERS = 10_000  # the plan loops over layers

# Attributes without an effect on the residual stream at inference.
_HARMLESS = frozenset(
    """
    transformers_version dtype torch_dtype name_or_path use_cache tie_word_embeddings
    initializer_range initializer_factor attention_dropout hidden_dropout resid_pdrop attn_pdrop embd_pdrop
    pretraining_tp return_dict output_attentions output_hidden_states torchscript gradient_checkpointing
    id2label label2id num_labels problem_type classifier_dropout task_specific_params finetuning_task
    tokenizer_class prefix attn_implementation is_llama_config transformers.js_config
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    unsloth_version unsloth_fixed max_sequence_length
    final_logit_softcapping cache_implementation
    max_length min_length do_sample temperature top_k top_p typical_p num_beams num_beam_groups diversity_penalty
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences early_stopping output_scores return_dict_in_generate remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens use_return_dict
    """.split()  # noqa: SIM905 - sixty lines with one word each are harder to read
)

# Attributes with an effect, and the value that disables it.
_NEUTRAL: dict[str, object] = {
    "add_cross_attention": False,
    "attention_bias": False,
    "chunk_size_feed_forward": 0,
    "is_causal": True,
    "is_decoder": True,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "is_encoder_decoder": False,
    "lm_head_bias": False,
    "mlp_bias": False,
    "moe_layer_freq": 1,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
    "rope_interleaved": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "use_bfloat16": False,
    "use_bidirectional_attention": False,
    "use_mrope": False,
}

_ACTIVATIONS = {
    "silu": Activation.silu,
    "swish": Activation.silu,
    "gelu": Activation.gelu,
    "gelu_new": Activation.gelu_tanh,
    "gelu_fast": Activation.gelu_tanh,
    "gelu_pytorch_tanh": Activation.gelu_tanh,
    "relu": Activation.relu,
    "relu2": Activation.relu2,
}


class HfConfig(JsonConfig):
    """A config.json, or a mapping inside one. Records which attributes were read."""

    user, results = "model", "activations"

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        super().__init__(values, where)
        self._nulls = values.keys() - self.values.keys()

    def num_layers(self, key: str) -> int:
        return self.positive_int(key, most=_MAX_LAYERS)

    def optional_int(self, key: str, default: int | None) -> int | None:
        """A whole number above 0; None if the value is null, or if it is absent and the default is None."""
        return None if self._is_none(key, default) else self.positive_int(key, default)

    def optional_float(self, key: str, default: object = REQUIRED) -> float | None:
        """A number above 0, or None as in `optional_int`."""
        return None if self._is_none(key, default) else self.positive_float(key, default)

    def _is_none(self, key: str, default: object) -> bool:
        return key in self._nulls or (default is None and key not in self.values)

    def positive_floats(self, key: str) -> tuple[float, ...]:
        """A list of numbers above 0."""
        values = self._take(key, (list,), "a list of numbers above 0", REQUIRED)
        numbers = HfConfig({str(number): value for number, value in enumerate(values)}, f"{self.where}: {key}")
        return tuple(numbers.positive_float(str(number)) for number in range(len(values)))

    def flag(self, key: str, default: bool, null: bool | None = None) -> bool:
        """True or false. If the file has null, `null` if given, else the default."""
        uses_null = key in self._nulls and null is not None
        return super().flag(key, null if uses_null else default)

    def strings(self, key: str) -> list[str]:
        """A list of strings; empty if the key is absent."""
        return self._list(key, str, "a list of strings")

    def whole_numbers(self, key: str) -> list[int]:
        """A list of whole numbers; empty if the key is absent."""
        return self._list(key, int, "a list of whole numbers")

    def _list(self, key: str, kind: type, what: str) -> list[Any]:
        values = self._take(key, (list,), what, [])
        if not all(type(value) is kind for value in values):
            raise self._wrong(key, values, what)
        return values

    def activation(self, key: str, default: str) -> Activation:
        return _ACTIVATIONS[self.choice(key, _ACTIVATIONS, default)]

    def set_defaults(self, **values: object) -> None:
        """Adds the values of absent attributes that most families require."""
        self.values = values | self.values

    def _is_harmless(self, key: str) -> bool:
        if key in _HARMLESS or key.startswith("_") or key.endswith(("_token_id", "_token_ids", "_token_index")):
            return True
        return key in _NEUTRAL and self.values[key] == _NEUTRAL[key]


Reader = Callable[[HfConfig], tuple[Architecture, KeyTable]]
"""What a family's `read` is. Raises CheckpointError for values that are not implemented."""


def text_reader(*ignored: str, **readers: Reader) -> Reader:
    """A reader of the language model of a multimodal checkpoint, whose attributes are in `text_config`. `readers` are
    by its `model_type`; the first is the default. `ignored` attributes are of other parts."""

    def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
        config.ignore("vision_config", "audio_config", *ignored)
        text = config.nested("text_config")
        config.ignore(*(key for key, value in text.values.items() if config.values.get(key) == value))  # written twice
        config.ignore(*text._nulls)  # transformers 4.53 wrote outdated values of these outside of `text_config`
        _check_quantization(text)
        text.ignore("architectures", "auto_map", "is_decoder")
        arch, table = readers[text.choice("model_type", readers, next(iter(readers)))](text)
        text.finish()
        return arch, table

    return read


def refuse_unreadable(config: HfConfig, families: Collection[str]) -> None:
    """Raises CheckpointError for quantisations that are not implemented, and for models that need code from their
    repository."""
    _check_quantization(config)
    if config.values.get("auto_map") and str(config.values.get("model_type")) not in families:
        raise CheckpointError(
            f"{config.where} has an auto_map: the model is defined by code in its repository, which is never run. "
            f"Use a model of an implemented family."
        )
    config.ignore("auto_map")  # for implemented families, transformers ignores it, too, without trust_remote_code


def _check_quantization(config: HfConfig) -> None:
    """Raises CheckpointError for a quantisation other than MXFP4, FP8 in blocks and 4 bits in groups."""
    quantization = config.nested("quantization_config")
    method = quantization.values.get("quant_method")
    checks = {"fp8": _check_fp8, "compressed-tensors": _check_int4, "gptq": _check_gptq, "awq": _check_awq}
    if "quantization_config" in config and method not in ("mxfp4", *checks):
        raise CheckpointError(
            f"{config.where} has a quantization_config: expected float32, float16, bfloat16, mxfp4, fp8, gptq, awq or "
            f"compressed-tensors weights, got {shown(method)}. {_UNQUANTISED}"
        )
    if method in checks:
        checks[method](quantization)


def _check_int4(config: HfConfig) -> None:
    """Raises CheckpointError unless this is packed INT4 with a scale per group of a row, or per row, and unquantised
    activations."""
    config.choice("format", ("pack-quantized",), remedy=_UNQUANTISED)
    config.require({"sparsity_config": {}, "transform_config": {}})
    config.ignore("quant_method", "ignore", "quantization_status", "global_compression_ratio", "version")
    groups = config.nested("config_groups")
    for name in groups.values:
        group = groups.nested(name)
        group.ignore("targets")
        group.choice("format", ("pack-quantized",), "pack-quantized", remedy=_UNQUANTISED)
        weights = group.nested("weights")
        weights.require({"num_bits": 4, "type": "int", "dynamic": False})
        weights.choice("strategy", ("group", "channel"), remedy=_UNQUANTISED)
        weights.choice("actorder", ("static", "weight"), "static", remedy=_UNQUANTISED)  # columns keep their order
        weights.flag("symmetric", True)
        weights.ignore("group_size", "observer", "observer_kwargs", "block_structure", "scale_dtype", "zp_dtype")
        weights.finish()
        group.finish()
    config.finish()


_OF_KERNELS = ("backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse", "use_exllama")
_OF_CALIBRATION = (
    *("block_name_to_quantize", "damp_percent", "damp_auto_increment", "dataset", "desc_act", "max_input_length"),
    *("model_seqlen", "module_name_preceding_first_block", "static_groups", "sym", "tokenizer", "true_sequential"),
)


def _check_gptq(config: HfConfig) -> None:
    """Raises CheckpointError unless this is GPTQ's own format with 4 bits. Groups of columns in any order
    (`desc_act`) are in the weights."""
    config.require({"bits": 4, "pack_dtype": "int32", "is_marlin_format": False, "lm_head": False, "dynamic": {}})
    config.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq", remedy=_UNQUANTISED)
    config.ignore("quant_method", "group_size", "batch_size", "cache_block_outputs", "disable_exllama", "meta")
    config.ignore("model_file_base_name", "model_name_or_path", "modules_in_block_to_quantize", "pad_token_id")
    config.ignore("use_cuda_fp16", *_OF_KERNELS, *_OF_CALIBRATION)
    config.finish()


def _check_awq(config: HfConfig) -> None:
    """Raises CheckpointError unless this is the layout of AutoAWQ's `gemm` with 4 bits and zeros."""
    config.require({"bits": 4, "zero_point": True})
    config.choice("version", ("gemm", "GEMM"), "gemm", remedy=_UNQUANTISED)
    config.ignore("quant_method", "group_size", "modules_to_not_convert", *_OF_KERNELS)
    config.finish()


def _check_fp8(config: HfConfig) -> None:
    """Raises CheckpointError unless this is FP8 with a scale per block and unquantised activations."""
    block = config.whole_numbers("weight_block_size")
    if len(block) != 2 or min(block) < 1:
        raise CheckpointError(
            f"{config.where}: weight_block_size is {shown(block or None)}, expected two whole numbers above 0: other "
            f"kinds of FP8 are not implemented. {_UNQUANTISED}"
        )
    config.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")  # two names of one format
    config.choice("activation_scheme", ("dynamic",), "dynamic")
    config.choice("scale_fmt", ("float", "ue8m0"), "float")  # the scales are stored as floats either way
    config.ignore("quant_method", "modules_to_not_convert", "ignored_layers")  # visible from the tensors' dtypes
    config.finish()
