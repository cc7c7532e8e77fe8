"""Jinja templates: chat templates of tokenizers, rendered as transformers does, and text templates of datasets.

A template's text only depends on its input and, where it calls `strftime_now`, on a date that is given. Its work is not
limited: the watchdog ends a run whose template does not end.
"""

import datetime
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn, TypeVar

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.core.errors import ConfigError
from pipeline.data.text.following import Following, follow
from pipeline.data.text.labelling import Labeller, mark_generated
from pipeline.data.text.labels import REASONING, LabelledText
from pipeline.data.text.tagged import tojson

T = TypeVar("T")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+(?=>)")  # in the text of an object; differs between processes


class RenderError(ValueError):
    """A template cannot be rendered with the given values."""


class ChatTemplate:
    """A tokenizer's chat template, equal in result to `apply_chat_template` of transformers
    (utils/chat_template_utils.py)."""

    def __init__(
        self,
        source: str,
        owner: str,
        *,
        named_tokens: Mapping[str, str] | None = None,
        variables: Mapping[str, Any] | None = None,
        date: str | None = None,
    ) -> None:
        """owner: the tokenizer, for messages. named_tokens: bos_token and others. variables: as in
        `data.template_kwargs`. date: what `strftime_now` formats, as in 2026-07-01; None for today.

        The template is compiled when it is first used: texts need none.
        """
        self._source = source
        self._subject = f"the chat template of tokenizer {owner}"
        self._named_tokens = dict(named_tokens or {})
        self._variables = dict(variables or {})
        self._fixed = self._named_tokens | self._variables
        self._date = datetime.date.fromisoformat(date) if date else datetime.date.today()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool,
    ) -> str:
        """tools: None for those of `variables`.

        Raises ConfigError for a template that cannot be used, and RenderError if it cannot render these messages.
        """
        return self._rendered(self._compiled.render, messages, tools, add_generation_prompt)

    def render_labelled(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool,
    ) -> LabelledText:
        """The same text, with labels. Raises as `render` does, and RenderError where texts cannot be followed."""
        return self._rendered(self._labeller.render, messages, tools, add_generation_prompt)

    def _rendered(
        self,
        render: Callable[[dict[str, Any]], T],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> T:
        # transformers removes null values, and gives a message's reasoning under the names that templates read.
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        values = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        values |= {"messages": [_with_reasoning(message) for message in chat], **self._fixed}
        try:
            return render(values if tools is None else values | {"tools": tools})
        except Exception as error:  # whatever the template's expressions raise
            raise RenderError(f"{self._subject} fails: {_message(error)}") from error

    def identity(self) -> dict[str, object]:
        """What determines a rendered chat, as plain JSON values. Raises ConfigError."""
        source = json.dumps([self._source, self._named_tokens], sort_keys=True)
        identity: dict[str, object] = {"chat_template_sha256": hashlib.sha256(source.encode()).hexdigest()}
        if self._variables:
            identity["template_kwargs"] = self._variables
        if "strftime_now" in self._compiled.names:
            identity["date"] = self._date.isoformat()
        return identity

    @cached_property
    def _labeller(self) -> Labeller:
        template = self._compiled  # reports one that cannot be used
        environment = self._environment(Following)
        follow(environment)
        return Labeller(environment.from_string(self._source), self._fixed, has_generation=template.has_generation)

    def _environment(self, kind: type[ImmutableSandboxedEnvironment]) -> ImmutableSandboxedEnvironment:
        environment = _environment(jinja2.Undefined, [_Generation, jinja2.ext.loopcontrols], _fixed, kind)
        midnight = datetime.datetime.combine(self._date, datetime.time())
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": midnight.strftime}
        return environment

    @cached_property
    def _compiled(self) -> "_Template":
        try:
            template = _Template(self._environment(ImmutableSandboxedEnvironment), self._source)
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"{self._subject} fails: {error}. Set data.template=plain, or correct the template."
            ) from error
        read = template.variables - {"messages", "add_generation_prompt"}
        if unknown := sorted(map(str, self._variables.keys() - read)):
            raise ConfigError(
                f"data.template_kwargs has {', '.join(unknown)}, which {self._subject} does not read. It reads "
                f"{', '.join(sorted(read)) or 'no variables'}."
            )
        return template


class TextTemplate:
    """Makes a document's text from a dataset's row: `{{ question }}\\n{{ choices.text[0] }}`.

    Printing a null, or a column that the row lacks, raises RenderError.
    """

    def __init__(self, source: str) -> None:
        """Raises jinja2.TemplateError if `source` is not a template."""
        self._template = _Template(_environment(jinja2.StrictUndefined, [], _not_null), source)
        self.columns = self._template.variables
        if r"\n" in self._template.text:
            raise jinja2.TemplateError(r"""its \n is no line break; bash makes one of it in $'data.text="...\n..."'""")

    def __call__(self, row: Mapping[str, Any]) -> str:
        """Raises RenderError."""
        return self._template.render(row)


class _Template:
    """variables: those that must be given. names: all names in the template. text: what is outside of expressions."""

    def __init__(self, environment: ImmutableSandboxedEnvironment, source: str) -> None:
        """Raises jinja2.TemplateError."""
        try:
            source.encode()
            tree = environment.parse(source)
            self.names = {node.name for node in tree.find_all(jinja2.nodes.Name)}
            self.has_generation = tree.find(jinja2.nodes.ExtensionAttribute) is not None
            self.variables = jinja2.meta.find_undeclared_variables(tree)
            self.text = "".join(node.data for node in tree.find_all(jinja2.nodes.TemplateData))
            self._template = environment.from_string(source)
        except (RecursionError, MemoryError, SyntaxError, ValueError) as error:  # too deep; a constant is too large
            raise jinja2.TemplateError(f"it cannot be compiled ({_message(error)})") from error

    def render(self, values: Mapping[str, Any]) -> str:
        """Raises RenderError."""
        try:
            return self._template.render(values)
        except Exception as error:  # whatever the template's expressions raise
            raise RenderError(_message(error)) from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text, in a scope of its own as in transformers."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.CallBlock:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(lineno)

    def _text(self, caller: Callable[[], str]) -> str:
        return mark_generated(caller())


def _environment(
    undefined: type[jinja2.Undefined],
    extensions: list[type[jinja2.ext.Extension]],
    printed: Callable[[Any], Any],
    kind: type[ImmutableSandboxedEnvironment] = ImmutableSandboxedEnvironment,
) -> ImmutableSandboxedEnvironment:
    """transformers' environment, without what would differ from run to run."""
    environment = kind(
        trim_blocks=True, lstrip_blocks=True, undefined=undefined, extensions=extensions, finalize=printed
    )
    environment.filters["tojson"] = tojson
    del environment.filters["random"], environment.globals["lipsum"]
    return environment


def _message(error: Exception) -> str:
    """The error's text, the same in every run, since the reasons for skipped documents are stored."""
    return _ADDRESS.sub("", str(error)) or type(error).__name__


def _fixed(value: Any) -> Any:
    """The printed value. Raises jinja2.TemplateError for one whose text differs between processes."""
    if isinstance(value, set | frozenset) or (not isinstance(value, str) and _ADDRESS.search(str(value))):
        raise jinja2.TemplateError(f"a {type(value).__name__} has no fixed text. Print its values, e.g. with | list")
    return value


def _not_null(value: Any) -> Any:
    if value is None:
        raise jinja2.TemplateError("a value of the template is null")
    return _fixed(value)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    given = [message[name] for name in REASONING if name in message]
    return {"thinking": given[0], **message, "reasoning_content": given[0]} if given else message


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
