"""Addresses that users type: every command refuses malformed ones, and credentials are never shown."""

import os

import pytest

from pipeline import export, inspect
from pipeline.config.composing import compose
from pipeline.core.addresses import has_credentials, unusable_store_path, without_credentials
from pipeline.core.errors import ConfigError, PipelineError, StoreInvalid
from pipeline.store import ActivationStore
from pipeline.store.io.storage import Storage
from tests.commands.store_commands import COMMANDS, call
from tests.store.example_store import write_store

SECRET = "hunter2"
WITH_CREDENTIALS = (
    f"https://user:a@{SECRET}@host/store",
    f"https://host/store?pwd=a'{SECRET}",
    f"gs://user:{SECRET}@bucket/store",
    f"https://user:{SECRET}@host/store",
    f"https://user:{SECRET}/x@host/store",
    f"s3://{SECRET}@bucket/store",
    *(
        f"https://host/store?a=1&{name}={SECRET}"
        for name in ("auth", "pwd", "token", "sig", "X-Amz-Signature", "passwd")
    ),
    *(f"gs://bucket/store?{name}={SECRET}" for name in ("auth", "pass", "api_key", "Secret", "AWSAccessKeyId", "sas")),
    f"s3://bucket/store;token={SECRET}",
    f"gs://bucket/store#access_token={SECRET}",
)
NONSENSE = (
    ("", "Give a folder"),
    ("   ", "Give a folder"),
    (" store", "whitespace"),
    ("store\n", "whitespace"),
    ("a\0b", "which contains"),
    ("a\x1b[31mb", "which contains"),
    ("a\u202eb", "which contains"),
    ("a\\b", "which contains"),
    ("a/zarr.json.__lock", "which contains '.__lock'"),
    ("a.__lock/b", "which contains '.__lock'"),
    ("$SCRATCH/a", "the shell did not replace"),
    ("a/${USER}", "the shell did not replace"),
    ("\udcff", "UTF-8"),
    ("~nosuchuser/x", "no such user"),
    ("http://localhost:1/store", "unsupported URL scheme"),
    ("https://localhost:1/store", "unsupported URL scheme"),
    ("ftp://localhost:1/store", "unsupported URL scheme"),
    ("gcs://bucket/store", "unsupported URL scheme"),
    ("S3://bucket/store", "unsupported URL scheme"),
    ("gs:/bucket/store", "unsupported URL scheme"),
    ("http:/host/store", "unsupported URL scheme"),
    ("hf://owner/name", "Expected hf://datasets/owner/name"),
    ("gs://", "not a store address"),
    ("s3:///store", "not a store address"),
    ("gs://bucket|zip:", "cannot be inside another file"),
    ("gs://bucket/store?x=1", "not a store address"),
    ("file://host/store", "not a store address"),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_store(str(tmp_path / "sound"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_malformed_addresses_and_creates_nothing(folder, command, capsys):
    for path, message in (*NONSENSE, ("x" * 300, ""), ("x/" * 3000, "")):
        assert call(command, path) == 2, path
        printed = capsys.readouterr()
        assert message in printed.err or "sage: " in printed.err, (path, printed.err)
        assert "Traceback" not in printed.err
        assert os.listdir(folder) == ["sound"], path


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_shows_credentials(folder, command, capsys):
    for path in WITH_CREDENTIALS:
        assert call(command, path) == 2, path
        printed = capsys.readouterr()
        assert SECRET not in printed.out + printed.err, path
        assert "redentials" in printed.err or "scheme" in printed.err
    assert os.listdir(folder) == ["sound"]


@pytest.mark.parametrize("main", [inspect.main, export.main])
def test_an_unknown_setting_is_shown_without_credentials(main, capsys):
    assert main(["store.path=a", f"tokenizer=https://user:{SECRET}@host/x?auth={SECRET}"]) == 2
    printed = capsys.readouterr().err
    assert "is not a setting" in printed
    assert SECRET not in printed


@pytest.mark.parametrize(
    "path", ["", "~nosuchuser/x", "http://localhost:1/x", f"gs://b/x?auth={SECRET}", f"s3://{SECRET}@b"]
)
def test_the_configuration_refuses_malformed_addresses_before_opening_anything(path):
    with pytest.raises(ConfigError, match=r"store\.path|the store's path") as caught:
        compose(["data.path=texts", f"store.path='{path}'"])
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(("path", "message"), NONSENSE)
def test_the_reader_refuses_malformed_addresses(path, message):
    with pytest.raises(StoreInvalid, match=message):
        ActivationStore.open(path)


@pytest.mark.parametrize("path", ["store", "./~nosuchuser", "a/../b", ".", "a b/c", "run@3", "C:/x", "a|b", "2024:1/x"])
def test_ordinary_paths_are_usable(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert unusable_store_path(path) is None
    write_store(path)
    assert ActivationStore.open(path).complete


def test_home_directories_and_urls_are_accepted(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_store("~/store")
    assert ActivationStore.open(f"file://{tmp_path}/store").complete
    for path in ("gs://bucket/store", "s3://bucket/runs@2024/store", "memory://x"):
        assert Storage.open(path)


def test_errors_are_shown_without_credentials():
    for url in WITH_CREDENTIALS:
        assert has_credentials(url)
        error = PipelineError(f"{url} cannot be read: 'GET {url}' failed ({url}). Try again.")
        assert SECRET not in str(error), url
        assert str(error).endswith("Try again.")
    assert (
        without_credentials("see 'https://h/x?a=1', gs://u:p@b/c#d; x") == "see 'https://h/x?***', gs://***@b/c?***; x"
    )
    plain = "gs://bucket/a@b is missing; http://localhost:9000/x@y is not. What? See https://host/#a"
    assert without_credentials(plain) == plain.replace("#a", "?***")
    assert not any(
        map(has_credentials, ("gs://bucket/a@b", "http://localhost:9000/x@y", "a?b=c", "https://h/x?download=1"))
    )
