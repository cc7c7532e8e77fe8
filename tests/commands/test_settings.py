"""Settings of the commands for stores: values are used exactly as typed, and --help explains the settings."""

from dataclasses import dataclass, fields

import pytest

from pipeline import export, finalize, inspect, verify
from pipeline.cli.settings import UsageError, flag, names, one_of, parse, setting, store_path, whole_number
from pipeline.core.errors import ConfigError
from tests.commands.store_commands import COMMANDS, call


@dataclass(frozen=True)
class Settings:
    path: str = store_path()
    force: bool = setting("force", "whatever comes", flag, default=False)
    count: int = setting("number.count", "how many", whole_number(1), default=7)
    arrays: tuple[str, ...] = setting("arrays", "some", names, default=())
    dtype: str = setting("dtype", "stored as", one_of("a", "b"), default="a")


@pytest.mark.parametrize(
    "value", ["1e5", "~x", "0x10", "null", "true", "a=b", "a b", "[1,2]", "${x}", "007", "a'b", "-1"]
)
def test_a_text_is_used_as_typed(value):
    assert parse(Settings, [f"store.path={value}"]) == Settings(value)


@pytest.mark.parametrize("typed", ["'/a b'", '"/a b"', "/a b"])
def test_quotes_around_a_value_are_removed(typed):
    assert parse(Settings, [f"store.path={typed}"]).path == "/a b"


def test_every_kind_of_setting_is_parsed():
    given = ["store.path=x", "force=true", "number.count=12", "arrays=p,q", "dtype=b"]
    assert parse(Settings, given) == Settings("x", True, 12, ("p", "q"), "b")
    assert parse(Settings, ["store.path=x"]) == Settings("x", False, 7, (), "a")


WRONG_VALUES = [
    (Settings, "force=yes", "force=yes: expected true or false."),
    (Settings, "number.count=0", "number.count=0: expected a whole number of at least 1"),
    (Settings, "number.count=1.0", "number.count=1.0: expected a whole number"),
    (Settings, "number.count=" + "9" * 5000, r"number.count=9{80}... \(5,000 characters\): expected a whole number of"),
    (Settings, "number.count=9223372036854775808", "expected a whole number of at least 1, with at most 18 digits"),
    (Settings, "dtype=c", "dtype=c: expected a or b."),
    (verify.Settings, "verify.sample=-1", "verify.sample=-1: expected a number from 0 to 1."),
    (verify.Settings, "verify.sample=nan", "verify.sample=nan: expected a number from 0 to 1."),
    (inspect.Settings, "inspect.features=[1,x]", "inspect.features=.1,x.: expected whole numbers, e.g. .12,99.."),
    (export.Settings, "export.path=gs://a/b", "export.path=gs://a/b: expected a local path"),
]


@pytest.mark.parametrize(("settings", "argument", "message"), WRONG_VALUES)
def test_a_wrong_value_is_refused(settings, argument, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse(settings, ["store.path=x", argument])
    assert not isinstance(caught.value, UsageError)


def test_a_rank_beyond_the_world_is_refused(capsys):
    assert verify.main(["store.path=/x", "verify.rank=1"]) == 2
    assert "verify.rank=1: expected a number below verify.world=1. Ranks count from 0." in capsys.readouterr().err


WRONG_ARGUMENTS = [
    ([], "store.path is missing."),
    (["store.path="], "store.path has no value. Give it as store.path=..."),
    (["path=/x"], "'path=/x' is not a setting of this command. Did you mean store.path=/x?"),
    (["store_path=/x"], "'store_path=/x' is not a setting of this command. Did you mean store.path=/x?"),
    (["/x"], "'/x' is not a setting of this command. Did you mean store.path=/x?"),
    (["store.path=/a", "store.path=/b"], "store.path is given more than once. Give it once."),
    (["-v"], "'-v' is not a setting of this command."),
    (["="], "'=' is not a setting of this command."),
]


@pytest.mark.parametrize(("arguments", "problem"), WRONG_ARGUMENTS)
def test_wrong_arguments_print_the_usage(arguments, problem, capsys):
    assert finalize.main(arguments) == 2
    usage = "usage: python -m pipeline.finalize store.path=... [force=true] [index=true]"
    assert capsys.readouterr().err == f"{usage}\n{problem}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_without_its_settings_or_its_store_ends_with_2(name, tmp_path, capsys):
    assert COMMANDS[name].main([]) == 2
    assert capsys.readouterr().err.startswith(f"usage: python -m pipeline.{name} store.path=...")
    assert call(name, tmp_path / "nothing") == 2
    assert "there is no activation store" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_has_the_docstring_and_every_setting(name, capsys):
    command = COMMANDS[name]
    assert command.main(["store.path=nowhere", "--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: python -m pipeline.{name} ")
    assert command.__doc__.strip() in printed
    for field in fields(command.Settings):
        assert f"\n  {field.metadata['key']} " in printed
        assert field.metadata["doc"] in printed
