"""SAEs written by the libraries that train them have the same features and reconstructions. For `make test-saes`."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from pipeline.models.sae.encoding import decode, encode
from pipeline.models.sae.loading import open_sae
from tests.jobs import ROOT

PYTHON = Path(os.environ.get("SAES_PYTHON", ROOT / ".venv-saes/bin/python"))  # with scripts/saes-requirements.txt
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="make test-saes installs the libraries"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("saes")
    command = [str(PYTHON), "-m", "tests.models.sae_libraries", str(folder)]
    environment = os.environ | {"SPARSIFY_DISABLE_TRITON": "1"}  # its kernels need a GPU
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads(done.stdout.splitlines()[-1])


def test_features_and_reconstructions_equal_the_librarys(folder, capsys) -> None:
    root, names = folder
    assert len(names) >= 74
    worst = {}
    for name in names:
        sae, reference = open_sae(str(root / name)), np.load(root / name.split("/")[0] / "reference.npz")
        x, expected, arrays = reference["x"], reference["features"], sae.arrays()
        for slots in (4, sae.spec.width):
            found = encode(sae.spec, arrays, x[None], slots)
            index, value, n_active = (np.asarray(part)[0] for part in found[:3])
            np.testing.assert_array_equal(n_active, (expected > 0).sum(axis=1), err_msg=name)
            dense = np.zeros_like(expected)
            fires = index >= 0
            rows = np.broadcast_to(np.arange(len(x))[:, None], index.shape)
            dense[rows[fires], index[fires]] = value[fires]
            kth = -np.sort(-expected, axis=1)[:, min(slots, expected.shape[1]) - 1, None]
            largest = np.where((expected >= kth) & (expected > 0), expected, 0)
            np.testing.assert_array_equal(dense > 0, largest > 0, err_msg=name)
            error = np.abs(dense - largest).max() / expected.max()
            assert error < 1e-5, name
        if "w_dec" not in arrays:  # of a cross-layer transcoder, which writes to several layers
            worst[name] = error, 0.0
            continue
        out = np.asarray(decode(sae.spec, arrays, x, dense))
        errors = error, np.abs(out - reference["out"]).max() / np.abs(reference["out"]).max()
        assert errors[1] < 1e-5, name
        worst[name] = errors
    with capsys.disabled():
        values, outs = zip(*worst.values(), strict=True)
        print(f"\n{len(worst)} SAEs: values within {max(values):.1e} of the largest, reconstructions {max(outs):.1e}")


def test_the_table_of_what_is_read_is_up_to_date() -> None:
    command = [str(PYTHON), "scripts/docs/coverage.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
