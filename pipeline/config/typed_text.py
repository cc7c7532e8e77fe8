"""Keeps the text of overrides as typed: Hydra makes numbers of 2024_10, 12e4567 and true."""

from collections.abc import Collection, Iterator
from typing import Any

from hydra.core.override_parser.overrides_parser import HydraErrorListener
from hydra.errors import HydraException
from hydra.grammar.gen.OverrideLexer import CommonTokenStream, InputStream, OverrideLexer
from hydra.grammar.gen.OverrideParser import OverrideParser

from pipeline.config.keys import text_keys

_NOT_TEXT = (OverrideLexer.INT, OverrideLexer.FLOAT, OverrideLexer.BOOL)


def typed_key(override: str) -> str:
    """The key of an override such as `++data.path=x`."""
    return override.lstrip("+").partition("=")[0].strip()


def as_typed(overrides: Collection[str]) -> list[str]:
    """The overrides, with quotes around what Hydra would take for a number or a boolean in the value of a text key."""
    return [_as_typed(override) for override in overrides]


def _as_typed(override: str) -> str:
    if typed_key(override).replace("data.prompts.", "data.") not in text_keys():
        return override
    listener, lexer = HydraErrorListener(), OverrideLexer(InputStream(override))
    parser = OverrideParser(CommonTokenStream(lexer))
    for part in (lexer, parser):
        part.removeErrorListeners()
        part.addErrorListener(listener)
    try:
        tokens = list(_not_text(parser.override()))
    except HydraException:  # Hydra will refuse it
        return override
    override = override.rstrip()  # blanks must not follow a quote
    for token in reversed(tokens):
        override = f"{override[: token.start]}'{token.text}'{override[token.stop + 1 :]}"
    return override


def _not_text(node: Any) -> Iterator[Any]:
    """The tokens below a node of the parse tree that are a whole value, or a whole item of a list or a mapping, but not
    text."""
    children = getattr(node, "children", None) or ()
    if isinstance(node, OverrideParser.PrimitiveContext):
        tokens = [child.symbol for child in children if child.symbol.type != OverrideLexer.WS]
        yield from (tokens if len(tokens) == 1 and tokens[0].type in _NOT_TEXT else ())
        return
    for child in children:
        yield from _not_text(child)
