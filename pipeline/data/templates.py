"""Jinja templates in a sandbox: chat templates of tokenizers and text templates of data sets.

Both come from elsewhere, so they run in jinja2's immutable sandbox, and what a template gives must depend on its input
alone: the `strftime_now` that transformers offers to chat templates is absent here, and templates that ask whether it
is defined (LLaMA 3's) fall back to their fixed date.
"""

import json
from collections.abc import Callable
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant wrote; for rendering it is transparent."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def tojson(value: Any, indent: int | None = None) -> str:
    """JSON without the HTML escapes of jinja's own filter."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse_null(value: Any) -> Any:
    if value is None:
        raise jinja2.TemplateError("a value of the template is null")
    return value


def chat_template(source: str) -> jinja2.Template:
    """As `transformers.utils.chat_template_utils` compiles it. Raises jinja2.TemplateError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source)


class TextTemplate:
    """A document's text from a data set's row: `{{ question }}\\n{{ choices.text[0] }}`.

    A column that the row lacks, and a null where a value is printed, raise jinja2.TemplateError.
    """

    columns: frozenset[str]

    def __init__(self, source: str) -> None:
        """Raises jinja2.TemplateError when `source` is not a template."""
        environment = ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, finalize=_refuse_null, trim_blocks=True, lstrip_blocks=True
        )
        environment.filters["tojson"] = tojson
        self._render: Callable[..., str] = environment.from_string(source).render
        self.columns = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))

    def __call__(self, row: dict[str, Any]) -> str:
        return self._render(row)
