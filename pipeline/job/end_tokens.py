"""Which tokens end a completion."""

from collections.abc import Sequence

from pipeline.core.errors import CheckpointError
from pipeline.data.text.tokenizer import TextTokenizer
from pipeline.models.registry import Model


def end_tokens(model: Model, tokenizer: TextTokenizer, texts: Sequence[str] | None) -> tuple[int, ...]:
    """The sorted ids of `texts`; if None, those of generation_config.json or else config.json, as in transformers. In
    multimodal checkpoints they may be in its `text_config`.

    Raises ConfigError for a text that is not a single token, and CheckpointError for an id outside the vocabulary.
    """
    if texts is not None:
        return tuple(sorted({tokenizer.token_id("data.end_tokens", text) for text in texts}))
    checkpoint = model.checkpoint
    configs = checkpoint.generation_config, checkpoint.config, checkpoint.config.get("text_config", {})
    eos_token_id = next((config["eos_token_id"] for config in configs if "eos_token_id" in config), None)
    ids = eos_token_id if isinstance(eos_token_id, list) else [] if eos_token_id is None else [eos_token_id]
    if not all(type(number) is int and 0 <= number < model.vocab_size for number in ids):
        raise CheckpointError(
            f"{checkpoint.where}: eos_token_id is {eos_token_id}, expected token ids below {model.vocab_size}. Set "
            "data.end_tokens."
        )
    return tuple(sorted(set(ids)))
