"""Labels of a chat template's text, from the origin of each of its characters.

Rules, the same for every template:

* A text of the conversation has the label of the message and field that it comes from, wherever the template puts it:
  a system message that is folded into the user's turn is the system's. Only roles, and names and ids of tools that are
  written within another message, are that message's markup.
* What the template writes while it works on a message is that message's markup: markers of turns, `<think>`, recipients
  and channels, default texts. Outside of a loop over messages it belongs to the text that it is printed with or after,
  the rest up to the next text to that one; without any, e.g. a default system prompt, to none. BOS belongs to none.
* The generation prompt is markup of the role assistant, of no message, and not written by the assistant.
* Of an assistant's message, the markup with which the generation prompt begins is not written by the assistant: its
  header, also a `<think>` that the prompt opens. All else is, with the markers around its reasoning and calls and its
  end of turn, but without white space of the template after that. If a message has nothing in common with a generation
  prompt, its header is what precedes its text, if that has the role's name, or nothing. Where a template has
  `{% generation %}`, that alone decides.
* Reasoning within an assistant's text, up to `</think>`, is thinking, and its marks are markup.
* Definitions of tools belong to no message and no role. Text of no message is of the exchange before it.
* Each user's message after the first begins an exchange.
* A token has the label of its first character.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, groupby, pairwise, takewhile
from operator import attrgetter
from typing import Any

import jinja2
import numpy as np

from pipeline.data.text.following import Message, State, write_pieces
from pipeline.data.text.labels import REASONING, Label, LabelledText, Labels, Part, Role
from pipeline.data.text.tagged import Tagged, refuse, tag_all, tags_of

_ROLES = {role.name: role for role in Role} | dict.fromkeys(
    ("function", "ipython", "environment", "observation"), Role.tool
)
_PARTS = {
    **dict.fromkeys(REASONING, Part.thinking),
    **dict.fromkeys(("value", "text", "system_prompt", "refusal"), Part.text),
    **dict.fromkeys(("tool_calls", "function_call", "function_calls"), Part.tool_call),
    **dict.fromkeys(("tools", "functions"), Part.tool_definition),
}
_RECOGNISABLE = 20  # characters of a text that a template would not write by chance
# A tag is 32 * (message + 1) + kind, plus 16 in `{% generation %}`. A kind is a part, or one of these:
_PROMPT_KIND, _ROLE_KIND = len(Part), len(Part) + 1
_GENERATED, _PER_MESSAGE = 16, 32
_MARKUP = frozenset((Part.none, Part.markup, _PROMPT_KIND, _ROLE_KIND))
_PART_OF_KIND = [Part.markup if kind in _MARKUP else kind for kind in range(_GENERATED)]
_NAMES = frozenset((Part.markup, _ROLE_KIND, Part.tool_call))
_NO_MESSAGE = -1
_REASONING = re.compile(r"\A(?:(.*?)(<think>))?(.*?)(</think>)", re.DOTALL)
_MARKS = re.compile(r"<[^<>]*>|\[[^\[\]]*\]|\s|[^\s<\[]+|.", re.DOTALL)

_Texts = dict[tuple[int, int], list[str]]  # by message and part


@dataclass(slots=True)
class _Run:
    """Characters with one origin. start, end: offsets. at: the message that the template works on, or _NO_MESSAGE.
    first, last: what the assistant wrote of it, from and to."""

    text: str
    start: int
    end: int
    message: int
    kind: int
    is_generated: bool
    at: int
    first: int
    last: int


@dataclass
class Labeller:
    """Renders a chat template with labels. template: of the class `Following`. fixed: the values that are the same for
    all conversations."""

    template: jinja2.Template
    fixed: Mapping[str, Any]
    has_generation: bool

    def render(self, values: Mapping[str, Any]) -> LabelledText:
        """values: messages, tools and others. Raises what the template's expressions raise, and jinja2.TemplateError
        where texts cannot be followed."""
        roles = [_ROLES.get(message.get("role"), Role.none) for message in values["messages"]]
        text, runs, given = self._rendered(values, roles)
        dropped = _dropped(runs, given)
        _attach(runs)
        if self.has_generation:
            for run in runs:
                run.first = run.start if run.is_generated else run.end
        else:
            self._find_written(runs, roles)
        return LabelledText(text, _labels(runs, roles), dropped)

    @cached_property
    def _prompts(self) -> list[list[str]]:
        """The marks that begin an assistant's message: after a user, and after a tool's result. Of two prompts that
        have as much in common with a header, the first one counts."""
        system, user = {"role": "system", "content": "0"}, {"role": "user", "content": "0"}
        tool = {"type": "function", "function": {"name": "f", "description": "0", "parameters": {}}}
        conversations: list[Any] = [([user], None), ([system, user], None)]
        for arguments in ({}, "{}"):
            call = {"id": "0" * 9, "type": "function", "function": {"name": "f", "arguments": arguments}}
            result = {"role": "tool", "name": "f", "tool_call_id": call["id"], "content": "0"}
            conversations.append(([user, {"role": "assistant", "content": "0", "tool_calls": [call]}, result], [tool]))
        prompts = {}
        for messages, tools in conversations:
            with suppress(Exception):  # whatever a template raises for a conversation that it does not allow
                values, roles = {"messages": messages, "tools": tools, "documents": None}, [Role.user] * len(messages)
                text, runs, _ = self._rendered(values | {"add_generation_prompt": True}, roles)
                without, *_ = self._rendered(values | {"add_generation_prompt": False}, roles)
                last = max([run.end for run in runs if run.at != _NO_MESSAGE], default=0)
                prompts |= dict.fromkeys((text.removeprefix(without).lstrip(), text[last:].lstrip()))
        return [_MARKS.findall(prompt) for prompt in prompts]

    def _find_written(self, runs: Sequence[_Run], roles: Sequence[Role]) -> None:
        """Assistants wrote all of their messages but the header, and white space at the end."""
        by_message: dict[int, list[_Run]] = {}
        for run in runs:
            if run.message != _NO_MESSAGE and roles[run.message] is Role.assistant:
                run.first = run.start
                by_message.setdefault(run.message, []).append(run)
        for own in by_message.values():
            opening = [*takewhile(_is_markup, own)]
            text = "".join([run.text for run in opening])
            names_role = any(run.kind == _ROLE_KIND for run in opening)
            size = _header_size(text, self._prompts) or (len(text) if names_role else 0)
            for run in opening:
                run.first += min(size, len(run.text))
                size = max(0, size - len(run.text))
            for run in takewhile(_is_markup, reversed(own)):
                run.last = run.start + len(run.text.rstrip())
                run.first = min(run.first, run.last)
                if run.last > run.start:
                    break

    def _rendered(self, values: Mapping[str, Any], roles: Sequence[Role]) -> tuple[str, list[_Run], _Texts]:
        """The text, its runs, and the texts of the conversation."""
        given: _Texts = {}
        values = {**self.fixed, **values}
        both = zip(values["messages"], roles, strict=True)
        values["messages"] = [_message(index, message, role, given) for index, (message, role) in enumerate(both)]
        values["tools"] = _field(values["tools"], _NO_MESSAGE, Part.tool_definition, given)
        state = State(_tag(_NO_MESSAGE, _PROMPT_KIND) if values["add_generation_prompt"] else None)
        pieces, at_work, size = [], {}, 0
        for piece, tag in write_pieces(self.template, values, state):
            at_work[size] = _split(tag)[0]
            pieces.append(piece)
            size += len(piece)
        text, bos = "".join(pieces), self.fixed.get("bos_token") or ""
        bos_end = len(bos) if text.startswith(bos) else 0
        return text, _runs(text, "".join(map(tags_of, pieces)), at_work, bos_end), given


def _runs(text: str, tags: str, at_work: Mapping[int, int], bos_end: int) -> list[_Run]:
    """at_work: the message at work by the offset where its work begins."""
    codes = np.frombuffer(tags.encode("utf-32-le", "surrogatepass"), np.dtype("<u4"))
    changes = np.flatnonzero(codes[1:] != codes[:-1]) + 1
    bounds = sorted({0, *at_work, bos_end, *changes.tolist(), len(text)})
    runs, at = [], _NO_MESSAGE
    for start, end in pairwise(bounds):
        at = at_work.get(start, at)
        message, kind, is_generated = _split(tags[start])
        run = _Run(text[start:end], start, end, message, kind, is_generated, at, end, end)
        if start < bos_end:
            run.message, run.kind, run.at = _NO_MESSAGE, Part.markup, _NO_MESSAGE
        runs.append(run)
    return runs


def _tag(message: int, kind: int) -> str:
    return chr(_PER_MESSAGE * (message + 1) + kind)


@lru_cache(4096)
def _split(tag: str) -> tuple[int, int, bool]:
    """A tag's message and kind, and whether it is of `{% generation %}`."""
    number, code = divmod(ord(tag), _PER_MESSAGE)
    return number - 1, code % _GENERATED, code >= _GENERATED


def mark_generated(text: str) -> str:
    """A text of `{% generation %}`."""
    tags = tags_of(text)
    return Tagged(text, tags.translate({ord(tag): ord(tag) | _GENERATED for tag in set(tags)}))


def _message(index: int, message: Mapping[str, Any], role: Role, given: _Texts) -> Message:
    tagged = Message()
    tagged._markup = _tag(index, Part.markup)
    for key, value in message.items():
        if key == "role":
            tagged[key] = tag_all(value, _tag(index, _ROLE_KIND))
        elif key == "content":
            tagged[key] = _content(value, index, role, given)
        else:
            part = _PARTS.get(key, Part.markup)
            is_copy = part is Part.thinking and key != REASONING[0] and value == message.get(REASONING[0])
            owner = _NO_MESSAGE if part is Part.tool_definition else index
            tagged[key] = _field(value, owner, part, {} if is_copy else given)
    return tagged


def _content(value: Any, index: int, role: Role, given: _Texts) -> Any:
    part = Part.tool_result if role is Role.tool else Part.text
    if isinstance(value, list) and any(_is_thinking(item) for item in value):
        return [_field(item, index, Part.thinking if _is_thinking(item) else part, given) for item in value]
    is_split = role is Role.assistant and isinstance(value, str) and "</think>" in value
    found = _REASONING.match(value) if is_split else None
    if not found:
        return _field(value, index, part, given)
    kinds = (Part.text, Part.markup, Part.thinking, Part.markup)
    texts = [_field(text or "", index, kind, given) for text, kind in zip(found.groups(), kinds, strict=True)]
    return Tagged("").join([*texts, _field(value[found.end() :], index, Part.text, given)])


def _is_thinking(part: Any) -> bool:
    return isinstance(part, dict) and any(key in part for key in REASONING)


def _field(value: Any, message: int, part: int, given: _Texts) -> Any:
    """The value with tags. Adds its texts to `given`."""
    texts = given.setdefault((message, part), [])
    texts.extend([value] if isinstance(value, str) else _texts(value))
    return tag_all(value, _tag(message, part))


def _texts(value: Any) -> Iterator[str]:
    """The texts in a JSON value, except types and ids, which few templates write."""
    if isinstance(value, dict):
        value = [item for key, item in value.items() if key not in ("type", "id")]
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _dropped(runs: Sequence[_Run], given: _Texts) -> int:
    """The characters that were not written, without white space. Definitions of tools, which templates spell in many
    ways, count as a whole.

    Refuses a text whose tags were lost: one that stands in the markup.
    """
    written: Mapping[tuple[int, int] | None, list[str]] = defaultdict(list)
    for run in runs:
        written[None if run.kind in _MARKUP else (run.message, run.kind)].append(run.text)
    if (_NO_MESSAGE, Part.tool_definition) in written:
        del given[_NO_MESSAGE, Part.tool_definition]
    dropped = 0
    for key, texts in given.items():
        if key[1] not in _MARKUP and (missing := _missing(texts, written[key])):
            markup = "\0".join(written[None])
            recognisable = [text for text in map(str.strip, texts) if len(text) >= _RECOGNISABLE and text in markup]
            if recognisable:
                what = f"{str(recognisable[0])[:40]!r}, which the template writes as its own text"
                refuse(f"{what}, by a function or as a default")
            dropped += missing
    return dropped


def _missing(given: Sequence[str], written: Sequence[str]) -> int:
    if sum(map(len, given)) <= sum(map(len, written)):
        return 0
    sizes = [sum(len("".join(text.split())) for text in texts) for texts in (given, written)]
    return max(0, sizes[0] - sizes[1])


def _is_markup(run: _Run) -> bool:
    return run.kind in _MARKUP


def _attach(runs: Sequence[_Run]) -> None:
    """Gives each run of markup its message."""
    for run in runs:
        if run.at not in (_NO_MESSAGE, run.message) and run.kind in _NAMES:
            run.message, run.kind = run.at, Part.markup
    for at, group in groupby(runs, attrgetter("at")):
        outside = [*group] if at == _NO_MESSAGE else []
        owners = [run.message for run in outside]
        before = [*accumulate(owners, _last_message)]
        after = [*accumulate(reversed(owners), _last_message)][::-1]
        for index, run in enumerate(outside):
            if run.kind == Part.none:
                is_next = after[index] != _NO_MESSAGE and (index == 0 or owners[index - 1] == _NO_MESSAGE)
                run.message = after[index] if is_next else before[index]


def _last_message(last: int, message: int) -> int:
    return last if message == _NO_MESSAGE else message


def _header_size(opening: str, prompts: Sequence[Sequence[str]]) -> int:
    """The end of what a message's first markup has in common with the start of a generation prompt, given as marks."""
    marks, longest, end = _MARKS.findall(opening), 0, 0
    for wanted in prompts:
        for start in range(len(marks)):
            pairs = zip(marks[start:], wanted, strict=False)
            size = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if size > longest:
                longest, end = size, start + size
    return sum(map(len, marks[:end]))


def _labels(runs: Sequence[_Run], roles: Sequence[Role]) -> Labels:
    exchanges = [max(exchange - 1, 0) for exchange in accumulate(role is Role.user for role in roles)]
    roles = [*roles, Role.none]  # the last one is for _NO_MESSAGE
    starts, rows, row, exchange = [], [], None, 0
    for run in runs:
        exchange = exchange if run.message == _NO_MESSAGE else exchanges[run.message]
        role = Role.assistant if run.kind == _PROMPT_KIND else roles[run.message]
        for start, end, is_written in ((run.start, run.first, 0), (run.first, run.last, 1), (run.last, run.end, 0)):
            new = (run.message, exchange, role, _PART_OF_KIND[run.kind], is_written)
            if start < end and new != row:
                row = new
                starts.append(start)
                rows.append(row)
    values = np.fromiter(chain.from_iterable(rows), np.int16).reshape(-1, len(Label))
    return Labels(np.array(starts, np.int32), values)
