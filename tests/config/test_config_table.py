"""The README's table of configuration keys is generated from the schema, and the schema explains every key."""

import sys
from dataclasses import fields, is_dataclass
from enum import Enum

import pytest

from pipeline.config import limits
from pipeline.config import schema as config
from scripts.docs import config_table


def test_the_table_is_up_to_date(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["config_table.py", "--check"])
    assert config_table.main() == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", limits.LIMITS)
def test_every_key_has_a_doc_with_its_choices(name):
    for field in fields(getattr(config, name)):
        if is_dataclass(field.type):
            assert field.type.__doc__
            continue
        doc = field.metadata["doc"]
        assert doc
        if isinstance(field.type, type) and issubclass(field.type, Enum):
            assert [str(choice) for choice in field.type if f"`{choice}`" not in doc] == []
