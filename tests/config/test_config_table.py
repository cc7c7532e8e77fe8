"""The README's table of configuration keys is generated from the schema, and the schema explains every key."""

import subprocess
import sys
from dataclasses import fields, is_dataclass
from enum import Enum

import pytest

from pipeline.config import limits
from pipeline.config import schema as config
from tests.jobs import ROOT


def test_the_table_is_up_to_date():
    done = subprocess.run(
        [sys.executable, "scripts/docs/config_table.py", "--check"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


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
