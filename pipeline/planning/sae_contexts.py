"""Compares the activations that SAEs of `capture.encode` were trained on with those of the run, as far as their files
tell: features of an SAE mean little on what it has never seen."""

import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pipeline.config.choices import Contexts, LongDocuments, Packing, Positions, Windows
from pipeline.config.schema import RunConfig
from pipeline.core.errors import ConfigError
from pipeline.data.sources import renders_chat
from pipeline.data.text.tokenizer import TextTokenizer
from pipeline.models.sae.spec import SAEContext
from pipeline.planning.encoders import Encoder

log = logging.getLogger("pipeline")

_HUB_NAMES = {"gpt2-small": "gpt2", "mistral-7b": "mistral-7b-v0.1"}  # by TransformerLens' names


def with_sae_contexts(config: RunConfig, encoders: Sequence[Encoder], tokenizer: TextTokenizer | None) -> RunConfig:
    """The configuration, with `batch.contexts=sae` for rows like the contexts that all SAEs were trained on. tokenizer:
    None leaves `batch.separator` open. Raises ConfigError if the SAEs differ, or do not tell."""
    if config.batch.contexts is Contexts.given:
        return config
    contexts = [encoder.sae.context for encoder in encoders]
    found = {(sae.context_size, sae.prepend_bos, sae.concatenates, sae.separator) for sae in contexts}
    size, prepend_bos, concatenates, separator = found.pop()
    if found or not size:
        what = "were trained on different contexts" if found else "do not tell their contexts' size"
        raise ConfigError(
            f"batch.contexts=sae, but the SAEs of capture.encode {what}. Set batch.contexts=given, with batch.length, "
            "packing and windows."
        )
    changes: dict[str, Any] = {"length": size}
    if prepend_bos is not None:
        changes["windows"] = Windows.restart if prepend_bos else Windows.continued
    if concatenates is not None:
        changes |= {"packing": Packing.concat if concatenates else Packing.pack, "separator": None}
    if concatenates and not (prepend_bos and separator in (None, "bos")):  # else documents keep their BOS
        changes["separator"] = "" if separator is None else tokenizer and tokenizer.text_of(separator)
    shown = ", ".join(f"{name}={value}" for name, value in changes.items())
    log.info("batch.contexts=sae sets %s", shown)
    return replace(config, batch=replace(config.batch, **changes))


def compare_contexts(
    config: RunConfig, encoders: Sequence[Encoder], tokenizer: TextTokenizer | None, in_rows: bool = True
) -> None:
    """Logs a warning for each difference, once for all SAEs that have it. tokenizer: None if it is not open. in_rows:
    whether documents are put in rows of `batch.length`, unlike the texts of an Extractor."""
    begins = None
    has_own = renders_chat(config.data) or getattr(config.data, "tokens", None) is not None  # BOS, or none
    if tokenizer is not None and not has_own:
        begins = bool(len(tokenizer.ends[0]))
    arrays = defaultdict(list)
    for encoder in encoders:
        rows = _row_differences(config, encoder.sae.context, begins) if in_rows else ()
        for difference in (*_differences(config, encoder.sae.context, begins), *rows):
            arrays[difference].append(encoder.spec.key.name)
    for difference, names in arrays.items():
        others = f" and of {len(names) - 1} more" if len(names) > 1 else ""
        log.warning("capture.encode: the SAE of %s%s %s", names[0], others, difference)


def _differences(config: RunConfig, sae: SAEContext, begins: bool | None) -> Iterator[str]:
    """Each with both values, and the key to set. begins: whether documents begin with a token of the tokenizer or
    `data.prefix`; None: not known."""
    if sae.model_name and not _is_model(sae.model_name, config.model.path):
        yield f"was trained on {sae.model_name}, but model.path is {config.model.path}. Set model.path to that model."
    if sae.prepend_bos and begins is False:
        yield (
            "was trained on contexts that begin with BOS, but no document here does: data.special_tokens is "
            f"{config.data.special_tokens}, data.prefix is {config.data.prefix}. Set data.prefix to the text of BOS."
        )
    if sae.prepend_bos is False and begins:
        yield (
            "was trained on contexts without BOS, but documents here begin with a special token. Set "
            "data.special_tokens=none and data.prefix=null."
        )
    if config.capture.positions is not Positions.all:
        return
    if sae.excluded_tokens:
        which = "special tokens" if sae.excluded_tokens is True else f"the tokens {list(sae.excluded_tokens)}"
        yield f"was trained without {which}, but capture.positions is all. Leave them out with TokenFilter.drop_tokens."
    if sae.positions and any(sae.positions):
        yield (
            f"was trained on the positions slice{sae.positions} of contexts, but capture.positions is all. Leave out "
            "others with TokenFilter."
        )


def _row_differences(config: RunConfig, sae: SAEContext, begins: bool | None) -> Iterator[str]:
    batch = config.batch
    if sae.context_size and sae.context_size != batch.length:
        yield (
            f"was trained on contexts of {sae.context_size:,} tokens, but batch.length is {batch.length:,}. Set "
            f"batch.length={sae.context_size}."
        )
    is_cut = batch.long_documents is LongDocuments.cut and batch.packing is not Packing.concat
    if sae.prepend_bos and begins and batch.windows is Windows.continued and not is_cut:
        yield (
            "was trained on contexts that all begin with BOS, but here only documents do: batch.windows is continued. "
            "Set batch.windows=restart."
        )
    if sae.concatenates and batch.packing is not Packing.concat:
        yield (
            "was trained on contexts of joined documents, with attention across them, but batch.packing is "
            f"{batch.packing}. Set batch.packing=concat."
        )
    if sae.concatenates is False and batch.packing is Packing.concat:
        yield "was trained on contexts of one document, but batch.packing is concat. Set batch.packing=pack."
    if sae.separator not in (None, "bos") and batch.packing is Packing.concat and not batch.separator:
        yield (
            f"was trained with the token {sae.separator} between documents, but batch.separator is {batch.separator}. "
            "Set batch.separator to that token's text."
        )


def _is_model(name: str, path: str) -> bool:
    """Whether a path may be that of the model: a part of it has the model's name, without its owner."""
    plain = name.rpartition("/")[2].lower().removeprefix("meta-")  # which the Hub has dropped
    parts = [part.removeprefix("meta-") for part in re.split("/|--", path.lower())]
    return _HUB_NAMES.get(plain, plain) in parts
