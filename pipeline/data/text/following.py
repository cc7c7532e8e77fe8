"""A Jinja environment that follows texts from a template's values to its output.

The template is changed only where Jinja's code would lose a text's tags, or where the message at work must be known:
inside of a loop over messages, also one over their indices.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import jinja2
from jinja2 import filters, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from pipeline.data.text.tagged import NO_TAG, Safe, Tagged, as_text, has_tags, refuse, tojson

_STATE = " state"  # a variable that no template can name
# Filters whose results are values, or made by operations that keep tags.
_FOLLOWED = """
    abs attr batch capitalize center count d default dictsort first float groupby int items last length list lower map
    max min reject rejectattr replace reverse round select selectattr slice sort string sum trim truncate unique upper
    wordcount
"""


class Message(dict[str, Any]):
    """A message of the conversation. _markup: the tag of what the template writes while it works on it."""

    _markup: str


@dataclass
class State:
    """Of one render. prompt: the tag of the generation prompt, if it is asked for. markup: the tag of the message at
    work, or NO_TAG, per open loop."""

    prompt: str | None
    markup: list[str] = field(default_factory=lambda: [NO_TAG])


def follow(environment: ImmutableSandboxedEnvironment) -> None:
    """Changes the environment so that rendered texts keep their tags; its class must be `Following`."""
    printed = environment.finalize

    @jinja2.pass_context
    def write(context: jinja2.runtime.Context, value: Any) -> str:
        text = value if isinstance(value, Tagged) else as_text(printed(value))
        return _with_tag(text, context.parent[_STATE].markup[-1])

    environment.finalize = write
    for name in environment.filters.keys() - {*_FOLLOWED.split()}:
        environment.filters[name] = _refused(name)
    environment.filters |= _FILTERS


class Following(ImmutableSandboxedEnvironment):
    """The environment. `write_pieces` renders."""

    intercepted_binops = frozenset("%")

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str) and (has_tags(left) or has_tags(right)):
            refuse("the operator %")
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def concat(texts: Any) -> str:  # of a macro, a block, ...
        return Tagged("").join(texts)

    def getattr(self, obj: Any, attribute: str) -> Any:
        return super().getattr(Tagged(obj) if type(obj) is str else obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        original = super().wrap_str_format(value)
        if original is None:
            return None

        def fill(*args: Any, **named: Any) -> str:
            if has_tags([value.__self__, args, named]):
                refuse("format with texts of the conversation")
            return original(*args, **named)

        return fill

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Instrument().visit(super()._parse(source, name, filename)).set_lineno(1).set_environment(self)


def write_pieces(template: jinja2.Template, values: Mapping[str, Any], state: State) -> Iterator[tuple[str, str]]:
    """The rendered pieces in order, and the tag of the message at work of each."""
    for piece in template.generate({**values, _STATE: state}):
        yield piece, state.markup[-1]


def _with_tag(text: str, tag: str) -> str:
    """The text, with the tag for what is the template's."""
    if tag == NO_TAG:
        return text
    return Tagged(text, text._tags.replace(NO_TAG, tag) if isinstance(text, Tagged) else tag * len(text))


class _Instrument(NodeTransformer):
    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data)  # so that it is written like an expression

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter("joined", nodes.List(node.nodes)).set_lineno(node.lineno)

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        values: list[nodes.Node] = [node]
        while isinstance(values[0], nodes.Add):
            values[:1] = [values[0].left, values[0].right]
        return _filter("sum", nodes.List([self.visit(value) for value in values])).set_lineno(node.lineno)

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        targets = [node.target] if isinstance(node.target, nodes.Name) else [*node.target.find_all(nodes.Name)]
        indexed = {  # the lists whose entry at the target the body reads
            item.node.name
            for item in _inside(node.body)
            if isinstance(item, nodes.Getitem)
            and isinstance(item.node, nodes.Name)
            and (isinstance(item.arg, nodes.Name) and item.arg.name == targets[0].name)
        }
        self.generic_visit(node)
        loaded = nodes.List([nodes.Name(name.name, "load") for name in targets])
        node.body = [_statement("enter", loaded, *(nodes.Name(name, "load") for name in sorted(indexed))), *node.body]
        return [_statement("open"), node, _statement("close")]

    def visit_If(self, node: nodes.If) -> nodes.Node:
        self.generic_visit(node)
        if _asks_for_prompt(node.test):
            for output in nodes.Template(node.body).find_all(nodes.Output):
                output.nodes = [_filter("prompt", child) for child in output.nodes]
        return node

    def visit_CondExpr(self, node: nodes.CondExpr) -> nodes.Node:
        self.generic_visit(node)
        if _asks_for_prompt(node.test):
            node.expr1 = _filter("prompt", node.expr1)
        return node


def _asks_for_prompt(node: nodes.Node) -> bool:
    """Whether a condition needs `add_generation_prompt`."""
    if isinstance(node, nodes.Name):
        return node.name == "add_generation_prompt"
    return not isinstance(node, nodes.Not | nodes.Test) and any(map(_asks_for_prompt, node.iter_child_nodes()))


def _inside(body: list[nodes.Node]) -> Iterator[nodes.Node]:
    """The nodes of a loop's body, without those of loops in it."""
    for node in body:
        if not isinstance(node, nodes.For):
            yield node
            yield from _inside(list(node.iter_child_nodes()))


def _filter(name: str, value: nodes.Node, *args: nodes.Node) -> nodes.Filter:
    return nodes.Filter(value, f" {name}", list(args), [], None, None)


def _statement(name: str, *args: nodes.Node) -> nodes.ExprStmt:
    return nodes.ExprStmt(_filter(name, nodes.Const(None), *args))


@jinja2.pass_context
def _open(context: jinja2.runtime.Context, _: None) -> None:
    markup = context.parent[_STATE].markup
    markup.append(markup[-1])


@jinja2.pass_context
def _close(context: jinja2.runtime.Context, _: None) -> None:
    context.parent[_STATE].markup.pop()


@jinja2.pass_context
def _enter(context: jinja2.runtime.Context, _: None, items: list[Any], *lists: Any) -> None:
    """At the start of a loop's body. items: what it loops over. lists: what the items are indices of."""
    markup = context.parent[_STATE].markup
    index = items[0]
    if lists and isinstance(index, int):
        items = [entries[index] for entries in lists if isinstance(entries, list) and -1 < index < len(entries)]
    markup[-1] = next((item._markup for item in items if isinstance(item, Message)), markup[-2])


@jinja2.pass_context
def _joined(context: jinja2.runtime.Context, values: list[Any]) -> str:
    """Texts of the template among them may be printed when another message is at work."""
    tag, texts = context.parent[_STATE].markup[-1], [as_text(value) for value in values]
    tags = [text._tags if isinstance(text, Tagged) else tag * len(text) for text in texts]
    return Tagged("".join(texts), "".join(tags))


@jinja2.pass_context
def _sum(context: jinja2.runtime.Context, values: list[Any]) -> Any:
    is_text = {*map(type, values)} == {str, Tagged}  # neither Safe nor numbers
    return _joined(context, values) if is_text else reduce(add, values)


@jinja2.pass_context
def _prompt(context: jinja2.runtime.Context, value: Any) -> Any:
    tag = context.parent[_STATE].prompt
    return _with_tag(value, tag) if tag and isinstance(value, str) else value


def _indent(s: str, *args: Any, **kwargs: Any) -> str:
    return Tagged(s).indented(filters.do_indent(str.__str__(s), *args, **kwargs))


@jinja2.pass_eval_context
def _join(eval_ctx: nodes.EvalContext, value: Any, d: str = "", attribute: str | None = None) -> str:
    return filters.sync_do_join(eval_ctx, value, Tagged(d), attribute)


def _refused(name: str) -> Callable[..., Any]:
    return lambda *_, **__: refuse(f"the filter {name}")


_FILTERS = {
    "indent": _indent,
    "join": _join,
    "safe": lambda value: Safe(as_text(value)),
    "string": as_text,
    "title": lambda value: Tagged(as_text(value)).mapped(filters.do_title(str.__str__(as_text(value)))),
    "tojson": tojson,
    " joined": _joined,
    " sum": _sum,
    " open": _open,
    " close": _close,
    " enter": _enter,
    " prompt": _prompt,
}
