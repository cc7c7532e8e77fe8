"""A reader of config.json that accounts for every attribute.

An attribute is either read by the family, or known to have no effect, or has the value that disables it. Any other
attribute stops the program before weights are loaded.
"""

from collections.abc import Callable, Mapping

from pipeline.core.errors import CheckpointError
from pipeline.models.architecture import Activation, Architecture, KeyTable
from pipeline.models.checkpoints.json_config import REQUIRED, JsonConfig

MAX_LAYERS = 10_000  # the plan loops over layers

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

    def __init__(self, values: Mapping[str, object], where: str, user: str = "model") -> None:
        super().__init__(values, where, user)
        self._nulls = values.keys() - self.values.keys()

    def num_layers(self, key: str) -> int:
        return self.positive_int(key, most=MAX_LAYERS)

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

    def activation(self, key: str, default: str) -> Activation:
        return _ACTIVATIONS[self.choice(key, _ACTIVATIONS, default)]

    def set_defaults(self, **values: object) -> None:
        """Adds the values of absent attributes that most families require."""
        self.values = values | self.values

    def expect(self, is_met: bool, what: str, remedy: str = "Is the file damaged?") -> None:
        """Raises CheckpointError, which says what is expected and what the file has, unless it `is_met`."""
        if not is_met:
            raise CheckpointError(f"{self.where}: expected {what}. {remedy}")

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
        text.ignore("architectures", "auto_map", "is_decoder", "quantization_config")
        arch, table = readers[text.choice("model_type", readers, next(iter(readers)))](text)
        text.finish()
        return arch, table

    return read
