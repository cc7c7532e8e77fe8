"""Messages that name the key, for the errors of Hydra and OmegaConf when a command line does not compose."""

import re
import shlex
from contextlib import suppress
from dataclasses import fields

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from pipeline.config.effects import LOADERS
from pipeline.config.keys import key_remedy
from pipeline.config.limits import LIMITS, expected, shortened
from pipeline.core.addresses import without_credentials

HYDRAS_ERRORS = (HydraException, OmegaConfBaseException)
# For some command lines, Hydra also raises these. None of this program's code runs before composing.
COMPOSING_ERRORS = (
    *HYDRAS_ERRORS,
    *(ValueError, TypeError, AttributeError, AssertionError, LookupError, OSError, RecursionError),
)
_DETAILS = ("full_key:", "reference_type=", "object_type=", "See https://hydra.cc", "To append to your config")
_QUOTES = " A list with spaces needs quotes for the shell: 'capture.layers=[2, 3]'."


def composing_message(error: Exception, arguments: list[str]) -> str:
    """The message of an error that Hydra or OmegaConf raised for the command line `arguments`, with the remedy."""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return f"{cause.full_key} is not a key of the configuration.{key_remedy(cause.full_key)}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        return _unknown_choice(error.missing_cfg_file, error.options)
    reasons = [error] if cause is None or cause is error else [error, cause]
    message = ": ".join(_own_message(reason) for reason in reasons)
    if isinstance(error, ValueError | TypeError) and (given := _group_without_name(arguments)):
        return f"{given} is not a choice: {message}. Give a name, e.g. data=fineweb."
    owner = OmegaConf.get_type(cause.parent_node) if isinstance(cause, OmegaConfBaseException) else None
    if owner is not None and owner.__name__ in LIMITS and cause.key in {field.name for field in fields(owner)}:
        return f"{message}. Set {cause.full_key} to {expected(owner, cause.key)}."
    if not isinstance(error, HYDRAS_ERRORS):  # the message does not name the override
        given = ", ".join(shortened(argument, 80) for argument in arguments)
        message = f"Hydra cannot compose one of {without_credentials(given)}: {message}"
    quotes = _QUOTES if any("=[" in argument and "]" not in argument for argument in arguments) else ""
    is_multirun = {"-m", "--multirun"} & {*arguments}  # there, a,b are two values
    if not is_multirun and (quoted := next(filter(None, map(_quoted, arguments)), None)):
        quotes = f" A string with special characters needs quotes within quotes: {without_credentials(quoted)}."
    return f"{message}.{quotes} Correct the command line; --cfg job prints all keys."


def _unknown_choice(choice: str, options: list[str]) -> str:
    """The message for a choice `group/name` for which there is no YAML file or schema."""
    group, _, name = choice.rpartition("/")
    names = [option for option in options if not option.endswith("_schema")]
    other = " For any checkpoint of a known family: model.path=owner/name." if group == "model" else ""
    if group == "data":
        loader = name if name in LOADERS else "json"
        other = f" For {loader} files: data=hf data.path={loader} data.data_files=FILE."
    return f"{group}={name} is not one of {', '.join(names)}.{other}"


def _group_without_name(arguments: list[str]) -> str | None:
    """The override that sets a group to a value that is not a name. Hydra's error does not quote it."""
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    with suppress(HydraException, ValueError):  # an argument is not an override
        for override in OverridesParser.create().parse_overrides(overrides):
            values = override.value() if isinstance(override.value(), list) else [override.value()]
            if "." not in override.key_or_group and not all(isinstance(value, str | dict) for value in values):
                return shortened(override.input_line, 80)
    return None


def _quoted(argument: str) -> str | None:
    """An override as it must be typed in a shell, if its value is a string that Hydra can only parse in quotes."""
    key, equals, value = argument.partition("=")
    if equals and not _is_single_value(argument) and not re.match(r"[\[$]|\{(?!\{)", value):
        choices = (f"{key}={quote}{value}{quote}" for quote in "\"'")
        return next((shlex.quote(choice) for choice in choices if _is_single_value(choice)), None)
    return None


def _is_single_value(argument: str) -> bool:
    """Whether Hydra can parse an override, and its value is not a list of values to sweep over."""
    try:
        return not OverridesParser.create().parse_override(argument).is_sweep_override()
    except (HydraException, ValueError):
        return False


def _own_message(error: Exception) -> str:
    """The error's message without the lines of details that OmegaConf adds."""
    lines = (line.strip() for line in str(error).splitlines())
    message = " ".join(line for line in lines if line and not line.startswith(_DETAILS))
    return shortened(without_credentials(message), 1000).rstrip(".") or type(error).__name__
