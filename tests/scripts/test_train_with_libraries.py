"""Libraries for training SAEs train on streams, stores and exports. For `make test-saes`."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.jobs import ROOT

PYTHON = Path(os.environ.get("SAES_PYTHON", ROOT / ".venv-saes/bin/python"))
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="make test-saes installs the libraries"),
]


def test_every_library_trains_on_streams_and_stores():
    """The script raises unless the losses fall."""
    done = subprocess.run(
        [PYTHON, "scripts/examples/train_with_libraries.py"], cwd=ROOT, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    trained = re.findall(r"^(\w+) +(\w+) +loss \S+ to \S+, ", done.stdout, re.MULTILINE)
    expected = [
        (name, data) for name in ("sae_lens", "dictionary_learning", "sparsify") for data in ("stream", "store")
    ]
    assert {*expected, ("sae_lens", "cached")} <= set(trained)
