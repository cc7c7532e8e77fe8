"""Templates that run in the sandbox: chat templates of tokenizers, and text templates of datasets.

transformers' `strftime_now` is not available, since documents would depend on the date. Chat templates that check
whether it is defined (such as LLaMA 3's) fall back to a fixed date; others that call it are refused.
"""

import re
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext

from pipeline.data.text.sandbox import RENDER_ERRORS, Sandbox

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # removed, since the stored reason for a skip must be the same in every run


class RenderError(ValueError):
    """A template cannot be rendered with the given values."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text; it has no effect on rendering."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _ChatUndefined(jinja2.Undefined):
    """An undefined value may be tested, as in transformers, but not printed, except for a token that the tokenizer
    lacks."""

    def __str__(self) -> str:
        if self._undefined_obj is jinja2.utils.missing and self._undefined_name in NAMED_TOKENS:
            return ""
        self._fail_with_undefined_error()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Template:
    def __init__(self, sandbox: Sandbox, source: str) -> None:
        self._sandbox = sandbox
        self._template = sandbox.compile_bounded(source)

    def __call__(self, values: Mapping[str, Any]) -> str:
        """Raises RenderError."""
        try:
            return self._sandbox.render_bounded(self._template, values)
        except RENDER_ERRORS as error:
            message = _ADDRESS.sub("", str(error)) or type(error).__name__
            raise RenderError(message) from error


class ChatTemplate(_Template):
    """Renders as `transformers.utils.chat_template_utils` does."""

    def __init__(self, source: str) -> None:
        """Raises jinja2.TemplateError if `source` is not a template, or is refused."""
        sandbox = Sandbox(
            undefined=_ChatUndefined,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            functions={"raise_exception": _raise_exception},
            prints_null=True,
        )
        super().__init__(sandbox, source)


class TextTemplate(_Template):
    """Makes a document's text from a dataset's row: `{{ question }}\\n{{ choices.text[0] }}`.

    Printing a null, or a column that the row lacks, raises RenderError.
    """

    columns: frozenset[str]

    def __init__(self, source: str) -> None:
        """Raises jinja2.TemplateError if `source` is not a template, or is refused."""
        super().__init__(Sandbox(undefined=jinja2.StrictUndefined, prints_null=False), source)
        self.columns = frozenset(self._sandbox.columns)

    def __call__(self, row: Mapping[str, Any]) -> str:
        return super().__call__({name: row[name] for name in self._sandbox.names if name in row})
