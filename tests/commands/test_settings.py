"""Settings of the commands for stores: values are used exactly as typed, and --help explains the settings."""

from dataclasses import dataclass, fields

import pytest

from pipeline import delete, export, finalize, inspect, push, verify
from pipeline.cli.settings import UsageError, flag, names, one_of, parse, setting, store_path, whole_number
from pipeline.core.errors import ConfigError
from tests.jobs import run

COMMANDS = {
    "delete": delete,
    "export": export,
    "finalize": finalize,
    "inspect": inspect,
    "push": push,
    "verify": verify,
}


@dataclass(frozen=True)
class Settings:
    path: str = store_path()
    sources: tuple[str, ...] = setting("from", "stores", default=(), is_repeated=True)
    force: bool = setting("force", "whatever comes", flag, default=False)
    count: int = setting("number.count", "how many", whole_number(1), default=7)
    arrays: tuple[str, ...] = setting("arrays", "some", names, default=())
    dtype: str = setting("dtype", "stored as", one_of("a", "b"), default="a")


@pytest.mark.parametrize(
    "value", ["1e5", "~x", "0x10", "null", "true", "a=b", "a b", "[1,2]", "${x}", "007", "a'b", "-1"]
)
def test_a_text_is_used_as_typed(value):
    assert parse(Settings, [f"store.path={value}", f"from={value}"]) == Settings(value, (value,))


@pytest.mark.parametrize("typed", ["'/a b'", '"/a b"', "/a b"])
def test_quotes_around_a_value_are_removed(typed):
    assert parse(Settings, [f"store.path={typed}"]).path == "/a b"


def test_every_kind_of_setting_is_parsed():
    given = ["from=b", "store.path=x", "from=a", "force=true", "number.count=12", "arrays=p,q", "dtype=b"]
    assert parse(Settings, given) == Settings("x", ("b", "a"), True, 12, ("p", "q"), "b")
    assert parse(Settings, ["store.path=x"]) == Settings("x", (), False, 7, (), "a")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("force=yes", "force=yes: expected true or false."),
        ("number.count=0", "number.count=0: expected a whole number, at least 1."),
        ("number.count=-3", "number.count=-3: expected a whole number"),
        ("number.count=1.0", "number.count=1.0: expected a whole number"),
        ("number.count=" + "9" * 5000, r"number.count=9{80}... \(5,000 characters\): expected a whole number of"),
        ("number.count=9223372036854775808", "expected a whole number of at most 18 digits"),
        ("dtype=c", "dtype=c: expected a or b."),
    ],
)
def test_a_wrong_value_is_refused(argument, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse(Settings, ["store.path=x", argument])
    assert not isinstance(caught.value, UsageError)


@pytest.mark.parametrize("argument", ["store.path=y", "force=true force=true", "force=", "force", "x=1", "=", "--x"])
def test_unknown_empty_and_repeated_settings_are_usage_errors(argument):
    with pytest.raises(UsageError):
        parse(Settings, ["store.path=x", *argument.split()])


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["store.path=nowhere", "--help"]])
def test_the_help_has_the_docstring_and_every_setting(name, arguments, capsys):
    command = COMMANDS[name]
    assert command.main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: python -m pipeline.{name} ")
    assert command.__doc__.strip() in printed
    for field in fields(command.Settings):
        declared = field.metadata["setting"]
        assert f"\n  {declared.key} " in printed
        assert declared.doc in printed


@pytest.mark.parametrize("name", ["run", "plan"])
def test_the_help_of_run_and_plan_explains_keys_and_exit_codes(name):
    done = run("--help", module=f"pipeline.{name}")
    assert done.returncode == 0, done.stderr
    assert "Exit codes: 0" in done.stdout
    assert f"python -m pipeline.{name}" in done.stdout
    assert "stall_timeout_s: 600.0" in done.stdout
