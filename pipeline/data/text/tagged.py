"""Strings that know each character's origin, and JSON values made of them.

A tag is one character, so the tags of a text are a string of the same length: whatever slices, joins or repeats the
text does the same to its tags. `NO_TAG` is for characters of the template. An operation that cannot be followed is
refused: a text never loses its tags unnoticed.
"""

import json
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import jinja2
import markupsafe

NO_TAG = "\0"


class Tagged(str):
    """A string with a tag per character."""

    __slots__ = ("_tags",)
    _tags: str

    def __new__(cls, text: str, tags: str | None = None) -> "Tagged":
        """tags: as long as the text, or None for a text of the template."""
        tagged = str.__new__(cls, text)
        tagged._tags = tags_of(text) if tags is None else tags
        return tagged

    def __str__(self) -> str:
        return self

    def __iter__(self) -> Iterator[str]:
        return map(type(self), str.__iter__(self), self._tags)

    def __getitem__(self, key: Any) -> "Tagged":
        return type(self)(str.__getitem__(self, key), self._tags[key])

    def __add__(self, other: Any) -> "Tagged":
        if not isinstance(other, str):
            return NotImplemented
        return type(self)(str.__add__(self, other), self._tags + tags_of(other))

    def __radd__(self, other: Any) -> "Tagged":
        if not isinstance(other, str):
            return NotImplemented
        return type(self)(str.__add__(other, self), tags_of(other) + self._tags)

    def join(self, texts: Iterable[str]) -> "Tagged":
        items = [*texts]
        return type(self)(str.join(self, items), self._tags.join(map(tags_of, items)))

    def replace(self, old: str, new: str, count: Any = -1) -> "Tagged":
        if not old:
            refuse("replace with an empty text")
        return type(self)(new).join(self.split(old, count)) if old in self else self

    def split(self, sep: str | None = None, maxsplit: Any = -1) -> list[Any]:
        return self._parts(str.split(self, sep, maxsplit), len(sep or ""))

    def _parts(self, parts: Iterable[str], gap: int = 0) -> list["Tagged"]:
        """parts: in the order of the text; between two of them are `gap` characters, or white space."""
        position, tagged = 0, []
        for part in parts:
            start = str.find(self, part, position)
            tagged.append(self[start : start + len(part)])
            position = start + len(part) + gap
        return tagged

    def _part(self, text: str) -> "Tagged":
        """text: this one, stripped."""
        return self._parts([text])[0]

    def mapped(self, text: str) -> "Tagged":
        """text: this one, with each character replaced by another one."""
        if len(text) != len(self):
            refuse("a change of case that changes a text's length")
        return type(self)(text, self._tags)

    def indented(self, text: str) -> "Tagged":
        """text: this one, with characters inserted."""
        tags, position = [], 0
        for character in text:
            is_own = position < len(self) and str.__getitem__(self, position) == character
            tags.append(self._tags[position] if is_own else NO_TAG)
            position += is_own
        if position < len(self):
            refuse("an indent that changes a text's lines")
        return type(self)(text, "".join(tags))


class Safe(Tagged):
    """A text after the filter `safe`: one that is joined to it is escaped."""

    __slots__ = ()

    def __add__(self, other: Any) -> Tagged:
        return super().__add__(_escaped(other))

    def __radd__(self, other: Any) -> Tagged:
        return super().__radd__(_escaped(other))

    def join(self, texts: Iterable[str]) -> Tagged:
        return super().join(map(_escaped, texts))


def _escaped(other: Any) -> Any:
    if not isinstance(other, str) or isinstance(other, Safe):
        return other
    parts = [str(markupsafe.escape(character)) for character in str.__iter__(other)]
    return Tagged("".join(parts), "".join(tag * len(part) for tag, part in zip(tags_of(other), parts, strict=True)))


def _like(make: Callable[[Tagged, Any], Any], name: str) -> Callable[..., Any]:
    method = getattr(str, name)
    return lambda self, *arguments, **named: make(self, method(self, *arguments, **named))


def _refused(name: str) -> Callable[..., NoReturn]:
    return lambda self, *arguments, **named: refuse(f"the method {name}")


for _name in ("capitalize", "casefold", "lower", "swapcase", "title", "upper"):
    setattr(Tagged, _name, _like(Tagged.mapped, _name))
for _name in ("lstrip", "rstrip", "strip"):
    setattr(Tagged, _name, _like(Tagged._part, _name))
for _name in ("partition", "rpartition", "splitlines"):
    setattr(Tagged, _name, _like(Tagged._parts, _name))
for _name in (
    *("center", "encode", "expandtabs", "ljust", "removeprefix", "removesuffix", "rjust", "rsplit", "translate"),
    *("zfill", "__mod__", "__mul__", "__rmod__", "__rmul__"),
):
    setattr(Tagged, _name, _refused(_name))


class _Whole:
    """A value other than a text. _tag: of all its text, e.g. as JSON."""

    _tag: str

    def __str__(self) -> str:
        text = repr(self)
        return Tagged(text, self._tag * len(text))


_KINDS = {kind: type(kind.__name__, (_Whole, kind), {}) for kind in (int, float, dict, list)}


def tag_all(value: Any, tag: str) -> Any:
    """A JSON value whose texts and numbers have the tag. True, False and None cannot have one."""
    if isinstance(value, str):
        return Tagged(value, tag * len(value))
    if isinstance(value, dict):
        value = {tag_all(key, tag): tag_all(item, tag) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        value = [tag_all(item, tag) for item in value]
    if type(value) in _KINDS:
        value = _KINDS[type(value)](value)
        value._tag = tag
    return value


def tags_of(text: str) -> str:
    return text._tags if isinstance(text, Tagged) else NO_TAG * len(text)


def has_tags(value: Any) -> bool:
    """Whether a value holds text of a conversation."""
    if isinstance(value, Tagged):
        return bool(value._tags.strip(NO_TAG))
    if isinstance(value, _Whole):
        return True
    if isinstance(value, dict):
        return any(has_tags(key) or has_tags(item) for key, item in value.items())
    return isinstance(value, list | tuple) and any(map(has_tags, value))


def as_text(value: Any) -> str:
    """`str(value)`, with tags."""
    if isinstance(value, dict | list | tuple) and not isinstance(value, _Whole) and has_tags(value):
        refuse(f"a {type(value).__name__} with texts of the conversation that is printed as it is")
    return str(value)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON with tags, without the HTML escapes of Jinja's filter."""
    options = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
    plain = json.dumps(value, **options)
    if not has_tags(value):
        return plain
    tags, end = [], 0
    for text, own in _leaves(value, options, depth=0):
        start = plain.index(text, end)  # between two of them are only brackets, separators and white space
        tags += [NO_TAG * (start - end), own]
        end = start + len(text)
    return Tagged(plain, "".join(tags).ljust(len(plain), NO_TAG))


def _leaves(value: Any, options: dict[str, Any], depth: int) -> Iterator[tuple[str, str]]:
    """The JSON of each part that has no parts with other tags, in order, and its tags."""
    if isinstance(value, _Whole) or not isinstance(value, str | dict | list | tuple):
        indent = options["indent"]
        step = " " * indent if isinstance(indent, int) else indent or ""
        text = json.dumps(value, **options).replace("\n", "\n" + step * depth)
        yield text, (value._tag if isinstance(value, _Whole) else NO_TAG) * len(text)
    elif isinstance(value, str):
        text, tags = json.dumps(value, **options), tags_of(value)
        if tags == tags[:1] * len(tags):
            yield text, (tags[:1] or NO_TAG) * len(text)
        else:
            sizes = [len(json.dumps(character, **options)) - 2 for character in str.__iter__(value)]
            yield text, "".join([tags[0], *map(operator.mul, tags, sizes), tags[-1]])
    elif isinstance(value, dict):
        for key, item in sorted(value.items()) if options["sort_keys"] else value.items():
            yield from _leaves(key if isinstance(key, str) else json.dumps(key), options, depth + 1)
            yield from _leaves(item, options, depth + 1)
    else:
        for item in value:
            yield from _leaves(item, options, depth + 1)


def refuse(what: str) -> NoReturn:
    """Raises jinja2.TemplateError."""
    raise jinja2.TemplateError(
        f"labels cannot be followed through {what}. Use another template (model.tokenizer), or render the text with "
        "data.text"
    )
