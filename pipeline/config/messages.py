"""What Hydra and OmegaConf raise for a command line that does not compose, as one message that names the key."""

from contextlib import suppress
from dataclasses import fields

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from pipeline.config.keys import key_remedy
from pipeline.config.limits import LIMITS, expected, shortened
from pipeline.core.addresses import without_credentials

HYDRAS_ERRORS = (HydraException, OmegaConfBaseException)
# What else comes out of Hydra for a command line that makes no sense. Nothing of this program runs before it composes.
COMPOSING_ERRORS = (
    *HYDRAS_ERRORS,
    *(ValueError, TypeError, AttributeError, AssertionError, LookupError, OSError, RecursionError),
)
_FOR_PROGRAMMERS = ("full_key:", "reference_type=", "object_type=", "See https://hydra.cc", "To append to your config")


def composing_message(error: Exception, arguments: list[str]) -> str:
    """What Hydra and OmegaConf say of a command line that does not compose, in one line, with what can be done."""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return f"{cause.full_key} is no key of the configuration. {key_remedy(cause.full_key)}"
    reasons = [error] if cause is None or cause is error else [error, cause]
    said = ": ".join(_said(reason) for reason in reasons)
    if isinstance(error, ValueError | TypeError) and (given := _group_without_name(arguments)):
        return f"{given} names no choice: {said}. Give a name, e.g. data=fineweb."
    owner = OmegaConf.get_type(cause.parent_node) if isinstance(cause, OmegaConfBaseException) else None
    if owner is not None and owner.__name__ in LIMITS and cause.key in {field.name for field in fields(owner)}:
        return f"{said}. Set {cause.full_key} to {expected(owner, cause.key)}."
    if not isinstance(error, HYDRAS_ERRORS):  # it names nothing
        given = ", ".join(shortened(argument, 80) for argument in arguments)
        said = f"Hydra cannot compose one of {without_credentials(given)}: {said}"
    return f"{said}. Correct the command line; --cfg job prints what it may set."


def _group_without_name(arguments: list[str]) -> str | None:
    """The override that gives a group something else than names, which Hydra does not say."""
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    with suppress(HydraException, ValueError):  # one of them is no override
        for override in OverridesParser.create().parse_overrides(overrides):
            values = override.value() if isinstance(override.value(), list) else [override.value()]
            if "." not in override.key_or_group and not all(isinstance(value, str | dict) for value in values):
                return shortened(override.input_line, 80)
    return None


def _said(error: Exception) -> str:
    """The message without the lines that OmegaConf adds for programmers."""
    lines = (line.strip() for line in str(error).splitlines())
    said = " ".join(line for line in lines if line and not line.startswith(_FOR_PROGRAMMERS))
    return shortened(without_credentials(said), 1000).rstrip(".") or type(error).__name__
