"""Rows equal SAELens's contexts of the same real text, token by token. For `make test-saes`."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from pipeline.config.composing import PACKAGE, compose
from pipeline.job.opening import open_job
from tests.jobs import ROOT, write_text

PYTHON = Path(os.environ.get("SAES_PYTHON", ROOT / ".venv-saes/bin/python"))  # with scripts/saes-requirements.txt
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON.exists(), reason="make test-saes installs the libraries")]
LENGTH = 128
BOS, EOS = "<|im_start|>", "<|im_end|>"


def write_tokenizer(folder: Path, source: Path, adds_bos: bool) -> Path:
    """A copy of a tokenizer with BOS and EOS tokens; with `adds_bos` it puts BOS before every text."""
    folder.mkdir()
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    if adds_bos:
        bos = [(BOS, tokenizer.token_to_id(BOS))]
        tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=bos)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def write_config(folder: Path, vocab_size: int) -> Path:
    folder.mkdir()
    config = json.loads((PACKAGE / "assets/tiny-qwen2/config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
    return folder


def rows_of(*overrides: str) -> np.ndarray:
    """All full rows of a job's only stream."""
    job = open_job(compose([*overrides, "capture.layers=[0]", "data.num_streams=1", "store.rows_per_block=16"]))
    blocks = list(job.stream(0).blocks())
    rows, segments = (np.concatenate([getattr(b, name) for b in blocks]) for name in ("tokens", "segments"))
    return rows[segments[:, -1] > 0]


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("material", ["bundled", "shared"])
def test_rows_equal_the_contexts_of_saelens(material, adds_bos, tmp_path, request):
    source = PACKAGE / "assets/tiny-qwen2"
    if material == "shared":
        shared = request.getfixturevalue("shared")
        source, texts = shared / "tokenizers/qwen2", tmp_path / "texts"
        texts.mkdir()
        shutil.copy(shared / "data/prose/000_00000.parquet", texts)
    else:
        texts = write_text(tmp_path / "texts", files=2, documents=60)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", source, adds_bos)
    size = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).get_vocab_size()
    model, folder = write_config(tmp_path / "model", size), tmp_path / "contexts"
    folder.mkdir()
    files = sorted(map(str, texts.glob("*.parquet")))
    command = [str(PYTHON), "-m", "tests.data.saelens_contexts", str(folder), str(tokenizer), *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    adds = () if adds_bos else (f'data.prefix="{BOS}"',)
    job = (f"model.path={model}", "model.init=random", f"model.tokenizer={tokenizer}", f"data.path={texts}")
    job += (f"store.path={tmp_path / 'store'}", f"batch.length={LENGTH}", "batch.packing=concat", *adds)
    separators = {"bos": f'batch.separator="{BOS}"', "eos": f'batch.separator="{EOS}"', "None": "batch.separator=''"}
    settings = {
        f"{bos}-{name}": (f"batch.windows={'restart' if bos else 'continued'}", separator)
        for bos in (True, False)
        for name, separator in separators.items()
    }
    for name, overrides in settings.items():
        expected = np.load(folder / f"{name}.npy")
        assert len(expected) > 50
        np.testing.assert_array_equal(rows_of(*job, *overrides), expected, err_msg=name)
    # The default of SAELens is also what documents with BOS of their own give.
    np.testing.assert_array_equal(rows_of(*job, "batch.windows=restart"), np.load(folder / "True-bos.npy"))
