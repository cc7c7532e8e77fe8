"""The commands that work on a store: their settings, `--help`, and exit codes.

Settings are typed as `key=value`. They are the fields of a frozen dataclass, each made by `setting`.
"""

import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, Field, field, fields
from typing import Any, TypeVar

from pipeline.core.addresses import unusable_path
from pipeline.core.errors import EXIT_OK, ConfigError, PipelineError
from pipeline.core.messages import did_you_mean, shortened

S = TypeVar("S")
_HELP = {"--help", "-h"}
_MAX_DIGITS = 18  # of numbers that 64 bits hold


def command(name: str, doc: str, settings: type[S], task: Callable[[S], int | None]) -> Callable[[Sequence[str]], int]:
    """The command's `main`: calls `task` with the settings in its arguments, and returns the task's exit code (None: 0)
    or that of its error. With `--help`, prints `doc`, the command's docstring, and the settings instead."""

    def main(arguments: Sequence[str]) -> int:
        if _HELP & set(arguments):
            print(f"{usage(name, settings)}\n\n{inspect.cleandoc(doc)}\n\nSettings:\n\n{settings_help(settings)}")
            return EXIT_OK
        try:
            return task(parse(settings, arguments)) or EXIT_OK
        except PipelineError as error:
            if isinstance(error, UsageError):
                print(usage(name, settings), file=sys.stderr)
            print(error, file=sys.stderr)
            return error.exit_code

    return main


class UsageError(ConfigError):
    """A setting is unknown, missing or given twice."""


def text(value: str, _key: str) -> str:
    return value


def flag(value: str, key: str) -> bool:
    if value not in ("true", "false"):
        raise ConfigError(f"{key}={value}: expected true or false.")
    return value == "true"


def names(value: str, _key: str) -> tuple[str, ...]:
    """Comma-separated names; one that is given twice counts once."""
    return tuple(dict.fromkeys(filter(None, value.split(","))))


def one_of(*choices: str) -> Callable[[str, str], str]:
    def parse(value: str, key: str) -> str:
        if value not in choices:
            raise ConfigError(f"{key}={value}: expected {' or '.join(choices)}.")
        return value

    return parse


def whole_number(minimum: int) -> Callable[[str, str], int]:
    def parse(value: str, key: str) -> int:
        if not value.isdecimal() or len(value) > _MAX_DIGITS or int(value) < minimum:
            expected = f"a whole number of at least {minimum}, with at most {_MAX_DIGITS} digits"
            raise ConfigError(f"{key}={shortened(value, 80)}: expected {expected}.")
        return int(value)

    return parse


def whole_numbers(value: str, key: str) -> tuple[int, ...]:
    """Comma-separated whole numbers, optionally in brackets."""
    parts = value.removeprefix("[").removesuffix("]").split(",")
    try:
        return tuple(whole_number(0)(part.strip(), key) for part in parts)
    except ConfigError as error:
        raise ConfigError(f"{key}={shortened(value, 80)}: expected whole numbers, e.g. [12,99].") from error


def fraction(value: str, key: str) -> float:
    """A number from 0 to 1."""
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise ConfigError(f"{key}={shortened(value, 80)}: expected a number from 0 to 1.")
    return number


def local_path(value: str, key: str) -> str:
    """A local path to write to, with `~` unexpanded."""
    if reason := unusable_path(value, key):
        raise ConfigError(reason)
    if "://" in value:
        raise ConfigError(f"{key}={value}: expected a local path, because this command writes local files.")
    return value


def setting(
    key: str,
    doc: str,
    parse: Callable[[str, str], Any] = text,
    *,
    default: Any = MISSING,
) -> Any:
    """A field of a command's settings, typed as `key=...`; required if it has no default.

    `parse(value, key)` returns the field's value, or raises ConfigError.
    """
    return field(default=default, metadata={"key": key, "doc": doc, "parse": parse})


def store_path() -> Any:
    """The field for the store that a command works on."""
    return setting("store.path", "the store: a local path, gs://bucket/folder or s3://bucket/folder")


def read_store_path() -> Any:
    """The field for the store that a command only reads."""
    places = "a local path, gs://bucket/folder, s3://bucket/folder or hf://datasets/owner/name"
    return setting("store.path", f"the store: {places}")


def parse(settings: type[S], arguments: Sequence[str]) -> S:
    """Parses arguments of the form key=value into settings; removes quotes around values. Raises UsageError, and
    ConfigError for a value that is not allowed."""
    by_key = {f.metadata["key"]: f for f in fields(settings)}
    values: dict[str, Any] = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in by_key:
            raise UsageError(f"{argument!r} is not a setting of this command.{_suggestion(argument, by_key)}")
        if not value:
            raise UsageError(f"{key} has no value. Give it as {key}=...")
        name = by_key[key].name
        if name in values:
            raise UsageError(f"{key} is given more than once. Give it once.")
        values[name] = by_key[key].metadata["parse"](value.strip("'\""), key)
    for key, declared in by_key.items():
        if declared.default is MISSING and declared.name not in values:
            raise UsageError(f"{key} is missing.")
    return settings(**values)


def _suggestion(argument: str, keys: Collection[str]) -> str:
    """The setting that a mistyped one probably means, as the end of a message."""
    key, separator, value = argument.partition("=")
    if not separator:
        return f" Did you mean store.path={argument}?" if "store.path" in keys and key[:1] != "-" else ""
    with_group = next((name for name in keys if name.endswith(f".{key}")), key)
    return did_you_mean(with_group, keys, ending=f"={value}")


def usage(command: str, settings: type) -> str:
    """A usage line with every setting; those with a default are in brackets."""
    return " ".join([f"usage: python -m pipeline.{command}", *(_typed(f) for f in fields(settings))])


def settings_help(settings: type) -> str:
    """A line for each setting: its key, its meaning and its default."""
    rows = [(f.metadata["key"], f"{f.metadata['doc']}{_default(f.default)}") for f in fields(settings)]
    width = max(len(key) for key, _ in rows)
    return "\n".join(f"  {key:{width}}  {doc}" for key, doc in rows)


def _typed(f: Field) -> str:
    if f.default is MISSING:
        return f"{f.metadata['key']}=..."
    example = "..." if f.default in (None, ()) else "true" if f.default is False else f.default
    return f"[{f.metadata['key']}={example}]"


def _default(default: Any) -> str:
    if default in (MISSING, None, ()):
        return ""
    return f" (default: {str(default).lower() if isinstance(default, bool) else default})"
