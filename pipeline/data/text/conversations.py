"""A dataset row's conversation, as messages for a chat template.

Data sets write conversations in many ways. Here they become the messages and tools that transformers'
`apply_chat_template` takes, in the form that the template can render (`TemplateForms`):

* A conversation is a column with a list of messages, also as JSON, or several columns, each a text or messages.
* Nulls are dropped at every depth, as Arrow pads objects with them; from arguments only if Arrow made them, and not
  from tools in JSON texts.
* A role has one of the names of `_ROLES`, or of `data.roles`; others are left to the template.
* Parts of text are joined unless the template takes them; parts of another kind are refused, as is a message whose only
  content is under an unknown key. Different texts of reasoning are joined.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.core.errors import ConfigError
from pipeline.core.messages import shown
from pipeline.data.text.labels import REASONING, Role
from pipeline.data.text.templates import ChatTemplate, RenderError

Message = dict[str, Any]

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "ai", "bot", "model", "assistant"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
    **{"system": "system", "developer": "developer"},
}
_COLUMN_ROLES = {
    **dict.fromkeys(("system", "system_prompt"), "system"),
    **dict.fromkeys(("prompt", "question", "query", "problem", "instruction", "input", "user"), "user"),
    **dict.fromkeys(("response", "completion", "answer", "output", "chosen", "rejected", "assistant"), "assistant"),
}
_CALL_ROLES = ("function_call", "tool_call")  # of messages whose text is a call, as JSON
_CONTENT = ("content", "value", "text", "system_prompt")  # the first with a text is a message's content
# Keys of a message which are no content.
_DETAILS = """
    name id tool_call_id weight loss type index model source lang language metadata meta date time timestamp created_at
    country state header hashed_ip recipient channel
"""
_TEXT_PARTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
_THINKING_PARTS = ("thinking", "reasoning")
_THINKING_TEXTS = ("thinking", "reasoning", "text", "content", "summary")  # keys of such a part


@dataclass(frozen=True)
class TemplateForms:
    """The forms in which a chat template takes what data sets write in several. They depend on the template alone.

    arguments: those of a tool call, as an `object` or as JSON `text`.
    no_content: the content of a message that only calls tools: `absent` or `empty`. (transformers drops null.)
    parts: the roles whose content may be a list of parts.
    """

    arguments: str = "object"
    no_content: str = "absent"
    parts: tuple[str, ...] = ()

    @classmethod
    def of(cls, template: ChatTemplate, *, has_tools: bool = False) -> "TemplateForms":
        """Tries them: the first ones, in the order above, with which the template writes the whole call; else those
        with which it writes anything. has_tools: whether to try with definitions of tools, which some templates need
        to write calls."""

        tools = [_TOOL] if has_tools else None

        def attempt(messages: Sequence[Message], plain: str | None = None) -> str:
            try:
                text = template.render(messages, tools=tools, add_generation_prompt=False)
            except RenderError:
                return ""
            is_wrong = plain is not None and any(text.count(word) > plain.count(word) for word in _MISTAKES)
            return "" if is_wrong else text

        plain = attempt([_QUESTION])
        forms = [cls(arguments, content) for arguments in ("object", "text") for content in _NO_CONTENT]
        words, whole, any_text = ("zname", "zkey", "zvalue"), [], []
        for rest in ([_RESULT, _ANSWER, _QUESTION, _ANSWER], []):  # some templates allow no results
            texts = {form: attempt([_QUESTION, form._call(), *rest], plain) for form in forms}
            whole += [form for form, text in texts.items() if all(text.count(w) > plain.count(w) for w in words)]
            any_text += [form for form, text in texts.items() if text]
        best = next(iter([*whole, *any_text, cls()]))
        before = {"system": [], "user": [], "assistant": [_QUESTION], "tool": [_QUESTION, best._call()]}
        parts = [{"type": "text", "text": text} for text in ("zone", "ztwo")]
        takes_parts = []
        for role, messages in before.items():
            after = [_QUESTION] if role == "system" else []
            text = attempt([*messages, {"role": role, "content": parts, **_CALL_ID}, *after], plain)
            takes_parts += [role] if "zone" in text and "ztwo" in text else []
        return cls(best.arguments, best.no_content, tuple(takes_parts))

    def _call(self) -> Message:
        function = {"name": "zname", "arguments": self.as_arguments('{"zkey": "zvalue"}')}
        calls = [{"id": _CALL_ID["tool_call_id"], "type": "function", "function": function}]
        return {"role": "assistant", "tool_calls": calls, **_NO_CONTENT[self.no_content]}

    def as_arguments(self, given: Any) -> Any:
        """The arguments of a call. A text that is no JSON object is left as it is."""
        if self.arguments == "text":
            return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        parsed = _parsed(given)
        return parsed if isinstance(parsed, dict) else given


_MISTAKES = ("{'", "None", '"type": "text"')  # objects and null as Python writes them; parts as JSON
_NO_CONTENT: dict[str, Message] = {"absent": {}, "empty": {"content": ""}}
_QUESTION = {"role": "user", "content": "zquestion"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "zname",
        "description": "ztool",
        "parameters": {
            "type": "object",
            "properties": {"zkey": {"type": "string", "description": "ztext"}},
            "required": ["zkey"],
        },
    },
}
_CALL_ID = {"tool_call_id": "zcall0000"}  # Mistral's templates take nine characters
_RESULT, _ANSWER = {"role": "tool", "content": "zresult", **_CALL_ID}, {"role": "assistant", "content": "zanswer"}


class Conversations:
    """Makes messages of rows. columns: all that are read. identity: what determines a row's messages, as plain JSON
    values."""

    def __init__(
        self,
        messages: str | Sequence[str],
        tools: str | None,
        roles: Mapping[str, str] | None,
        forms: TemplateForms,
        *,
        is_padded: bool = False,
    ) -> None:
        """messages, tools, roles: as in the configuration. is_padded: whether rows are Arrow's. Raises ConfigError."""
        roles = {} if roles is None else roles
        if not isinstance(roles, Mapping) or not all(isinstance(role, str) for role in roles.values()):
            raise ConfigError(f"data.roles is {shown(roles)}, expected roles by name: {{narrator: system}}.")
        if unknown := sorted({*roles.values()} - {role.name for role in Role if role}):
            raise ConfigError(f"data.roles has {unknown[0]}, expected {', '.join(role.name for role in Role if role)}.")
        self._columns = [messages] if isinstance(messages, str) else list(messages)
        self._is_padded = is_padded
        self._tools = tools
        self._roles = {**_ROLES, **{str(name).lower(): role for name, role in roles.items()}}
        self._forms = forms
        self._column_roles = {**_COLUMN_ROLES, **roles}
        for name in self._columns if len(self._columns) > 1 else ():
            if name not in self._column_roles:
                raise ConfigError(
                    f"data.messages contains {name}, whose role is not known. Set it, e.g. "
                    f"data.roles={{{name}: user}}; known are {', '.join(self._column_roles)}."
                )
        self.identity = {"messages": self._columns, "tools": tools, "roles": dict(roles), "forms": asdict(forms)}
        self.columns = {*self._columns, *([tools] if tools else [])}

    def messages(self, row: Mapping[str, Any]) -> list[Message]:
        """The row's messages. Raises ValueError for a row that is no conversation."""
        found: list[Message] = []
        for column in self._columns:
            value = _without_nulls(row.get(column), self._is_padded)
            listed = _messages_of(value)
            if listed is not None:
                given = [self._message(number, message) for number, message in enumerate(listed)]
                found += given[_num_common(found, given) :]
            elif len(self._columns) == 1 or not isinstance(value, str | None):
                raise ValueError(f"{column!r} is {shown(value)}, expected a list of messages, also as JSON")
            elif value is None and self._column_roles[column] != "system":
                raise ValueError(f"{column!r} is null")
            elif value or (value == "" and column == self._columns[-1]):
                found.append({"role": self._column_roles[column], "content": value})
        if not found:
            raise ValueError("the conversation is empty")
        return found

    def tools(self, row: Mapping[str, Any]) -> list[Any] | None:
        """The definitions of the row's tools; None without them. Raises ValueError."""
        value = _parsed(_without_nulls(row.get(self._tools), True)) if self._tools else None
        if not value:
            return None
        tools = [_parsed(tool) for tool in value] if isinstance(value, list) else [value]
        if not all(isinstance(tool, Mapping) for tool in tools):
            raise ValueError(f"{self._tools!r} is {shown(value)}, expected a list of tools, also as JSON")
        return tools

    def _message(self, number: int, given: Any) -> Message:
        role, message = _split_role(number, given)
        content = _take_content(message)
        calls = [*_calls(number, message.pop("tool_calls", None))]
        calls += map(_as_call, _calls(number, message.pop("function_call", None)))  # an earlier form
        if role.lower() in _CALL_ROLES and role.lower() not in self._roles:
            calls, role, content = [*map(_as_call, _calls(number, content or [content])), *calls], "assistant", None
        message = {"role": self._roles.get(role.lower(), role)} | message
        if calls:
            message["tool_calls"] = [self._call(call) for call in calls]
        thinking = ""
        if isinstance(content, list):
            content, thinking = self._joined(number, message["role"], content)
        elif isinstance(content, dict | int | float) and message["role"] == "tool":
            content = json.dumps(content, ensure_ascii=False)
        message = _with_reasoning(message, thinking)
        if not content and not calls and not any(message.get(name) for name in REASONING):
            _require_no_other(number, message)
        if content is None:
            return message | (_NO_CONTENT[self._forms.no_content] if calls else {"content": ""})
        if not isinstance(content, str | list):
            raise ValueError(f"message {number} has the content {shown(content)}, expected a text or parts of text")
        return message | {"content": content}

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """A tool call, with its arguments in the template's form."""
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": self._call(call["function"])}
        return {**call, "arguments": self._forms.as_arguments(call["arguments"])} if "arguments" in call else dict(call)

    def _joined(self, number: int, role: str, parts: list[Any]) -> tuple[str | list[Message], str]:
        """The texts of a message's parts, joined unless the template takes parts, and those of its thinking, joined."""
        texts, thinking = [], []
        for part in parts:
            part = {"text": part} if isinstance(part, str) else part
            kind = part.get("type", "text") if isinstance(part, dict) else None
            if kind in _TEXT_PARTS and isinstance(part.get("text", ""), str):
                texts.append(part.get("text", ""))
            elif kind in _THINKING_PARTS and any(name in part for name in _THINKING_TEXTS):
                for inner in (part[name] for name in _THINKING_TEXTS if name in part):
                    inner = inner if isinstance(inner, list) else [inner]
                    thinking.append(self._joined(number, "", inner)[0])
            else:
                raise ValueError(f"message {number} has the part {shown(part)}, expected only parts of text")
        if role in self._forms.parts:
            return [{"type": "text", "text": text} for text in texts], "".join(thinking)
        return "".join(texts), "".join(thinking)


def _split_role(number: int, given: Any) -> tuple[str, Message]:
    """A message's role, as it is written, and the rest of the message."""
    if not isinstance(given, Mapping):
        raise ValueError(f"message {number} is {shown(given)}, expected an object with role and content")
    message = dict(given)
    roles = [message.pop(name) for name in ("role", "from") if name in message]
    if not roles or not isinstance(roles[0], str):
        raise ValueError(f"message {number} has no role (`role` or `from`), only {', '.join(given) or 'nothing'}")
    return roles[0].strip(), message


def _take_content(message: Message) -> Any:
    """Removes a message's content, and copies of it; None if it has none."""
    given = [message[name] for name in _CONTENT if name in message]
    content = next((value for value in given if value not in ("", [], {})), given[0] if given else None)
    for name in _CONTENT:
        if name in message and message[name] in ("", [], {}, content):
            del message[name]
    return content


def _with_reasoning(message: Message, thinking: str) -> Message:
    """The message with all its texts of reasoning. thinking: those of its parts."""
    names = [name for name in REASONING if isinstance(message.get(name), str)]
    texts = {text.strip(): text for text in (*(message[name] for name in names), thinking) if text.strip()}
    if not thinking and len(texts) < 2:
        return message
    message = {name: value for name, value in message.items() if name not in names}
    return message | {"reasoning_content": "\n\n".join(texts.values())}


def _require_no_other(number: int, message: Message) -> None:
    """Raises ValueError if a message without content has some under another key."""
    names = {name for name, value in message.items() if value and isinstance(value, str | list | dict)}
    if names := sorted(names - {"role", *_CONTENT, *_DETAILS.split()}):
        raise ValueError(
            f"message {number} has no content, but {', '.join(names)}. Its text may be one of {', '.join(_CONTENT)}"
        )


def _num_common(found: Sequence[Message], given: Sequence[Message]) -> int:
    """How many messages at the end of `found` are the first ones given, e.g. a prompt and the whole conversation."""
    sizes = range(min(len(found), len(given)), 0, -1)
    return next((size for size in sizes if [*found[-size:]] == [*given[:size]]), 0)


def _calls(number: int, value: Any) -> list[Mapping[str, Any]]:
    """The tool calls of a list, or of a single call, also as JSON."""
    calls = _parsed(value) or []
    calls = [_parsed(call) for call in (calls if isinstance(calls, list) else [calls])]
    if not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"message {number} has the tool calls {shown(value)}, expected a list of objects")
    return calls


def _as_call(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return function if "function" in function else {"type": "function", "function": function}


def _messages_of(value: Any) -> list[Any] | None:
    """The messages of a list, or of a JSON text with a list of messages; None for other values."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        parsed = _parsed(value)
        items = parsed if isinstance(parsed, list) else []
        has_roles = [isinstance(item, dict) and not {"role", "from"}.isdisjoint(item) for item in items]
        return _without_nulls(items, False) if items and all(has_roles) else None
    return value if isinstance(value, list) else None


def _parsed(value: Any) -> Any:
    """The value of a JSON text; any other value as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _without_nulls(value: Any, is_padded: bool) -> Any:
    """The value without the keys whose values are null, and with dates and the like as texts. is_padded: whether nulls
    in arguments are Arrow's."""
    if isinstance(value, Mapping):
        keeps = {name: name == "arguments" and not is_padded for name in value}
        return {
            str(name): item if keeps[name] else _without_nulls(item, is_padded)
            for name, item in value.items()
            if item is not None
        }
    if isinstance(value, list | tuple):
        return [_without_nulls(item, is_padded) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)
