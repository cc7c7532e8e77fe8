"""Which tokens end a completion."""

from collections.abc import Sequence

from pipeline.core.errors import CheckpointError
from pipeline.data.text.tokenizer import TextTokenizer
from pipeline.models.registry import Model


def end_tokens(model: Model, tokenizer: TextTokenizer, texts: Sequence[str] | None) -> tuple[int, ...]:
    """The ids of `texts`, or, as in transformers, those of generation_config.json, else config.json: sorted.

    Raises ConfigError for a text that is not a single token, and CheckpointError for an id that is none.
    """
    if texts is not None:
        return tuple(sorted({tokenizer.token_id("data.end_tokens", text) for text in texts}))
    checkpoint = model.checkpoint
    found = checkpoint.generation_config.get("eos_token_id", checkpoint.config.get("eos_token_id"))
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(number) is int and 0 <= number < model.vocab_size for number in ids):
        raise CheckpointError(
            f"{checkpoint.where} has the eos_token_id {found}, expected token ids below {model.vocab_size}. Set "
            "data.end_tokens."
        )
    return tuple(sorted(set(ids)))
