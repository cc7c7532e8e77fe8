"""A jinja2 sandbox in which a template's result only depends on its input, and its work is bounded by the input's size.

Everything random, or dependent on the machine, the date or the version of Python, is unavailable: `random`, `lipsum`,
`pprint`, the text of functions and generators (memory addresses), sets (random order), methods such as `date.now`.

Work is counted in units: each character that an operation reads or writes is one unit, and each operation is
`OPERATION`. Growth is counted before it happens, so that `'x' * 10**10` raises `Unbounded` without taking memory.
"""

import datetime
import functools
import json
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.runtime import BlockReference, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from pipeline.data.text.sandbox_costs import (
    BASE,
    FILTER_GROWTH,
    OPERATION,
    PRINTF,
    Unbounded,
    bounded_range,
    method_growth,
    weight,
)

_PER_CHARACTER = 64  # additional units per character of the input
_MAX_SOURCE = 1 << 18  # characters of a template; the longest published chat templates have about ten thousand
_MAX_BITS = 4096  # of an integer
_MAX_DEPTH = 50  # of macros that call macros; Python's limit depends on the depth of the caller

_OWN_TYPES = (Namespace, LoopContext, Macro, BlockReference, Cycler, Joiner, jinja2.runtime.TemplateReference)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(dir(str)) - {"maketrans", "translate"},
    bytes: _words("decode hex"),
    list: _words("copy count index"),
    tuple: _words("count index"),
    dict: _words("copy get items keys values"),
    int: _words("bit_length is_integer"),
    float: _words("is_integer"),
    datetime.date: _words("date isocalendar isoformat isoweekday replace strftime time toordinal weekday"),
    datetime.time: _words("isoformat replace strftime"),
    datetime.timedelta: _words("total_seconds"),
}

# Filters that convert their values to text.
_TEXT_FILTERS = _words(
    "capitalize center e escape forceescape format indent join lower replace safe string striptags title tojson trim "
    "truncate upper urlencode wordcount wordwrap xmlattr"
)
_OTHER_FILTERS = _words(
    "abs attr batch count d default dictsort filesizeformat first float groupby int items last length list map max min "
    "reject rejectattr reverse round select selectattr slice sort sum unique"
)
# Filters that return one of their arguments, or a part: the result is not counted again.
_RETRIEVING = _words("attr d default first last max min")
_EACH, _WEIGHED, _JOINED = "(each)", "(weighed)", "(joined)"  # internal filters; a template cannot use these names

_REFUSED_STATEMENTS = {
    nodes.Include: "{% include %}",
    nodes.Import: "{% import %}",
    nodes.FromImport: "{% from %}",
    nodes.Extends: "{% extends %}",
    nodes.EvalContextModifier: "{% autoescape %}",
}


class _Meter(threading.local):
    """The remaining units of this thread's current rendering."""

    left = 0
    depth = 0  # of nested calls of macros, blocks and recursive loops


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(
        self,
        *,
        undefined: type[jinja2.Undefined],
        extensions: Iterable[str | type[jinja2.ext.Extension]] = (),
        functions: Mapping[str, Callable[..., Any]] | None = None,
        prints_null: bool,
    ) -> None:
        """functions: what a template may call in addition to range, dict, namespace, cycler and joiner."""
        super().__init__(
            undefined=undefined,
            extensions=list(extensions),
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # else the compiler would evaluate constants, without counting the work
            finalize=_printed,
            autoescape=False,
        )
        self._meter = _Meter()
        self._prints_null = prints_null
        self._num_nodes = 0
        del self.globals["lipsum"]
        self.globals["range"] = bounded_range
        self.globals |= functions or {}
        library = self.filters | {"tojson": self._tojson}
        self.filters = {name: self._metered(name, library[name]) for name in _TEXT_FILTERS | _OTHER_FILTERS}
        self.filters |= {_EACH: self._each, _WEIGHED: self._weighed, _JOINED: self._joined}
        self.tests = {name: self._metered("", test) for name, test in self.tests.items()}

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Compiles a template. Raises jinja2.TemplateError if it is invalid or refused."""
        if not isinstance(source, str):
            raise jinja2.TemplateError(f"it is a {type(source).__name__}, expected text")
        if len(source) > _MAX_SOURCE:
            raise jinja2.TemplateError(f"it has {len(source)} characters, expected at most {_MAX_SOURCE}")
        try:
            source.encode()
            tree = self.parse(source)
            self._check(tree)
            tree = _Counting().visit(tree)
            self._num_nodes = _count(tree)
            self.columns = jinja2.meta.find_undeclared_variables(tree)
            self.names = _names(tree)
            template = self.from_string(tree)
            self._refuse_unbounded(tree)
        except (RecursionError, SyntaxError) as error:  # SyntaxError: in the Python code that jinja2 generates
            raise jinja2.TemplateError(f"it is nested too deeply ({error})") from error
        except ValueError as error:  # a lone surrogate, or an integer with too many digits
            raise jinja2.TemplateError(str(error)) from error
        return template

    def render_bounded(self, template: jinja2.Template, values: Mapping[str, Any]) -> str:
        """Renders a template. Raises jinja2.TemplateError, and Python's errors for wrong values: `RENDER_ERRORS`."""
        self._meter.left = BASE + _PER_CHARACTER * sum(weight(value) for value in values.values())
        return template.render(values)

    # Methods that jinja2 calls during rendering.

    def concat(self, parts: Iterable[str]) -> str:
        """Joins the output of a template, a macro or a block."""

        def counted() -> Iterator[str]:
            for part in parts:
                self._spend(1 + len(part))
                yield part

        return "".join(counted())

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._spend(OPERATION)
        if isinstance(left, str) and operator == "%":
            return self._printf(left, right)
        for number in (left, right):
            if isinstance(number, int) and number.bit_length() > _MAX_BITS:
                raise Unbounded(f"an integer has more than {_MAX_BITS} bits")
        if isinstance(left, int) and isinstance(right, int):
            if operator == "**" and right > 0 and left.bit_length() * right > _MAX_BITS:
                raise Unbounded(f"{left} ** {right} has more than {_MAX_BITS} bits")
        elif operator == "*":
            sequence, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int):
                self._spend(len(sequence) * max(times, 0))
        elif operator == "+" and isinstance(left, str | bytes | list | tuple):
            self._spend(len(left) + (len(right) if isinstance(right, type(left)) else 0))
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, set | frozenset):
            raise jinja2.TemplateError("a set has no fixed order: it cannot be used")
        return result

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        self, function = __self, __obj
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        self._spend(OPERATION + self._measured(args) + self._measured(kwargs))
        if isinstance(function, Macro | LoopContext | BlockReference):
            self._spend(OPERATION * self._num_nodes)
            return self._nested(lambda: super(Sandbox, self).call(__context, function, *args, **kwargs))
        if isinstance(owner, str | bytes | list | tuple):
            self._spend(len(owner))
        if isinstance(owner, str):
            if name == "join" and args:
                args = (list(args[0]), *args[1:])
            self._spend(method_growth(name, owner, args, kwargs))
        result = super().call(__context, function, *args, **kwargs)
        if not isinstance(owner, dict | list | tuple):
            self._spend(self._measured(result))
        return result

    def _nested(self, call: Callable[[], Any]) -> Any:
        if self._meter.depth == _MAX_DEPTH:
            raise Unbounded(f"macros, blocks or recursive loops are called more than {_MAX_DEPTH} deep")
        self._meter.depth += 1
        try:
            return call()
        finally:
            self._meter.depth -= 1

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allows the methods in `_METHODS`, and what jinja2's sandbox permits of jinja2's own objects."""
        if not super().is_safe_attribute(obj, attr, value):
            return False
        if not callable(value) or isinstance(obj, _OWN_TYPES) or (obj is dict and attr == "fromkeys"):
            return True
        return any(isinstance(obj, kind) and attr in names for kind, names in _METHODS.items())

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        formatter, source = _BoundedFormatter(self), value.__self__
        if value.__name__ == "format_map":
            return lambda mapping: formatter.vformat(source, (), mapping)
        return lambda *args, **kwargs: formatter.vformat(source, args, kwargs)

    # Counting.

    def _spend(self, units: int) -> None:
        self._meter.left -= units
        if self._meter.left < 0:
            raise Unbounded("it takes too much work for its input: a loop, a repetition or a width is too large")

    def _measured(self, value: Any, *, printed: bool = False) -> int:
        """The units of a value, counted until they exceed the remaining ones."""
        return weight(value, self._meter.left, printed=printed)

    def _each(self, items: Iterable[Any], num_nodes: int) -> Iterator[Any]:
        """The items of a loop, whose body has `num_nodes` nodes; counts each iteration."""
        for item in items:
            self._spend(OPERATION + 4 * num_nodes)
            yield item

    def _weighed(self, value: Any) -> Any:
        self._spend(OPERATION + self._measured(value))
        return value

    def _joined(self, values: tuple[Any, ...]) -> str:
        """The operator `~`."""
        self._spend(OPERATION + self._measured(values, printed=True))
        return "".join(map(str, values))

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a filter, or a test (without a name), so that its work is counted."""
        first = int(hasattr(function, "jinja_pass_arg"))  # for some functions, the first argument is jinja2's context
        printed = name in _TEXT_FILTERS

        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            passed, values = args[:first], args[first:]
            if name == "join" and values and not isinstance(values[0], jinja2.Undefined):
                values = (list(values[0]), *values[1:])
            self._spend(OPERATION + self._measured((values, kwargs), printed=printed))
            if growth := FILTER_GROWTH.get(name):
                self._spend(max(0, growth(*values, **kwargs)))
            if name == "format":
                return self._printf(str(values[0]), kwargs or values[1:])
            result = function(*passed, *values, **kwargs)
            if isinstance(result, Iterator):
                return self._each(result, 1)
            if name not in _RETRIEVING:
                self._spend(self._measured(result))
            return result

        return metered

    def _printf(self, text: str, values: Any) -> str:
        widths = [number for pair in PRINTF.findall(text) for number in pair if number]
        if "*" in widths:
            raise jinja2.TemplateError(f"the width * of {text[:40]!r} is not supported")
        self._spend(len(text) + sum(map(int, widths)))
        self._spend((1 + text.count("%")) * self._measured(values, printed=True))
        return text % values

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON without the HTML escapes of jinja2's filter. The arguments are those in transformers."""
        if (len(indent) if isinstance(indent, str) else indent or 0) > 1000:
            raise Unbounded(f"tojson(indent={indent!r:.40}) is too large")
        settings = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
        return self.concat(json.JSONEncoder(**settings).iterencode(value))

    # Checks before rendering.

    def _check(self, tree: nodes.Template) -> None:
        for kind, name in _REFUSED_STATEMENTS.items():
            if next(tree.find_all(kind), None) is not None:
                raise jinja2.TemplateError(f"{name} is not supported")
        for used in tree.find_all(nodes.Filter):
            names = [used.name]
            if used.name == "map" and used.args and isinstance(used.args[0], nodes.Const):
                names.append(used.args[0].value)
            for name in names:
                if name not in self.filters:
                    raise jinja2.TemplateError(f"the filter {name!r} is not supported{_REASONS.get(name, '')}")
        if any(isinstance(const.value, float) and math.isinf(const.value) for const in tree.find_all(nodes.Const)):
            raise jinja2.TemplateError("a number is too large for a float")  # jinja2 would compile it to the name `inf`
        undeclared = jinja2.meta.find_undeclared_variables(tree)
        tested = {test.node.name for test in tree.find_all(nodes.Test) if isinstance(test.node, nodes.Name)}
        for called in tree.find_all(nodes.Call):
            if isinstance(called.node, nodes.Name) and (name := called.node.name) in undeclared - tested:
                raise jinja2.TemplateError(
                    f"the function {name!r} is not supported{_REASONS.get(name, '')}; there are "
                    f"{', '.join(sorted(self.globals))}"
                )

    def _refuse_unbounded(self, tree: nodes.Template) -> None:
        """Renders the parts that do not read the input, to find those that raise `Unbounded`. Ignores other errors."""
        constant = [statement for statement in tree.body if not _names(statement) & self.columns]
        if not self._renders(constant):
            self._probe(tree)
        else:
            for statement in tree.body:
                if statement not in constant:
                    self._probe(statement)

    def _probe(self, node: nodes.Node) -> None:
        part = node if isinstance(node, nodes.Stmt) else nodes.Output([node], lineno=1)
        takes_work = isinstance(node, nodes.BinExpr | nodes.Filter | nodes.Call | nodes.For)
        if takes_work and not _names(node) & self.columns and self._renders([part]):
            return
        for child in node.iter_child_nodes():
            self._probe(child)

    def _renders(self, body: list[nodes.Node]) -> bool:
        part = nodes.Template(body, lineno=1)
        part.set_environment(self)
        try:
            self.render_bounded(self.from_string(part), {})
        except Unbounded:
            raise
        except RENDER_ERRORS:
            return False
        return True


class _BoundedFormatter(SandboxedFormatter):
    """`str.format`, with the work for its fields counted."""

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        self._env._spend(OPERATION + self._env._measured(value, printed=True))
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec.endswith("n"):
            raise jinja2.TemplateError(f"the format {format_spec!r} depends on the machine's locale")
        self._env._spend(sum(map(int, re.findall(r"\d+", format_spec))))
        return super().format_field(value, format_spec)


class _Counting(NodeTransformer):
    """Wraps loops, `~`, comparisons and slices in filters of the sandbox, since jinja2 does not call it for them."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filter(node.iter, _EACH, [nodes.Const(_count(node), lineno=node.lineno)])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(nodes.Tuple(node.nodes, "load", lineno=node.lineno), _JOINED)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _filter(node.expr, _WEIGHED)
        for operand in node.ops:
            operand.expr = _filter(operand.expr, _WEIGHED)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _filter(node, _WEIGHED) if isinstance(node.arg, nodes.Slice) else node


def _filter(node: nodes.Expr, name: str, args: list[nodes.Expr] | None = None) -> nodes.Filter:
    return nodes.Filter(node, name, args or [], [], None, None, lineno=node.lineno, environment=node.environment)


def _count(tree: nodes.Node) -> int:
    return sum(1 for _ in tree.find_all(nodes.Node))


def _names(tree: nodes.Node) -> set[str]:
    return {name.name for name in tree.find_all(nodes.Name)}


@jinja2.pass_context
def _printed(context: jinja2.runtime.Context, value: Any) -> Any:
    """The output of `{{ value }}`."""
    sandbox = context.environment
    if value is None and not sandbox._prints_null:
        raise jinja2.TemplateError("a value of the template is null")
    sandbox._spend(OPERATION + sandbox._measured(value, printed=True))
    return value


_REASONS = {
    "random": ": a document would differ from run to run",
    "lipsum": ": a document would differ from run to run",
    "pprint": ": its text depends on the version of Python. Use tojson",
    "strftime_now": ": documents would depend on the date. Write the date into the template",
}

# The errors that wrong values cause during rendering.
RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
