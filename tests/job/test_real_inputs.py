"""The main job on real English documents and every fourth ARC-AGI training task, with the real Qwen2 tokenizer.

The model is a Qwen2 of tiny widths with random weights and the tokenizer's whole vocabulary.
"""

import json
import unicodedata

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from pipeline.config import composing
from pipeline.config.schema import ArcData
from pipeline.data.arc.encoders import grid_encoder
from pipeline.job.running import run
from pipeline.store import ActivationStore
from pipeline.store.check.verifying import verify_store
from tests.data.arc.undoing import decode_prompt

pytestmark = pytest.mark.heavy
VOCAB_SIZE = 151_646
MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(MODEL))
    return path


def stored_texts(shared, model, store, *overrides) -> tuple[ActivationStore, dict[str, str]]:
    """Runs the job to the end of its data and decodes every document from the stored token ids."""
    base = [
        f"model.path={model}",
        "model.init=random",
        f"model.tokenizer={shared / 'tokenizers' / 'qwen2'}",
        "capture.layers=[0]",
        "batch.rows=8",
        "batch.length=512",
        "run.progress=false",
        f"store.path={store}",
    ]
    run(composing.compose([*base, *overrides]))
    assert verify_store(str(store)) == []
    opened = ActivationStore.open(str(store))
    assert opened.complete
    rows = opened.read_tokens(opened.rows)
    valid = rows.segments > 0
    # The flat order is (row, position): a document's windows follow each other in it.
    documents, tokens = rows.documents[valid], rows.tokens[valid]
    order = np.argsort(documents, kind="stable")
    numbers, starts = np.unique(documents[order], return_index=True)
    pieces = dict(zip(numbers.tolist(), np.split(tokens[order], starts[1:]), strict=True))
    tokenizer = Tokenizer.from_file(str(shared / "tokenizers" / "qwen2" / "tokenizer.json"))
    names = dict(zip(opened.documents()["document"].to_pylist(), opened.documents()["id"].to_pylist(), strict=False))
    assert set(names) == set(pieces)
    return opened, {names[n]: tokenizer.decode(ids.tolist(), skip_special_tokens=False) for n, ids in pieces.items()}


def test_prose_is_recovered_from_the_stored_token_ids(shared, model, tmp_path):
    prose = shared / "data" / "prose"
    files = [f"data.path='{prose}/000_*.parquet'", "data.num_streams=1"]
    store, texts = stored_texts(shared, model, tmp_path / "store", "data=fineweb", *files)
    originals = {}
    for file in sorted(prose.glob("000_*.parquet")):
        table = pq.read_table(file, columns=["id", "text"])
        originals |= dict(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))
    # The Qwen2 tokenizer normalises text to NFC.
    assert texts == {name: unicodedata.normalize("NFC", text) for name, text in originals.items()}
    assert store.num_tokens > 0.97 * store.rows.size * 512 > 50_000


def test_arc_grids_are_recovered_from_the_stored_token_ids(shared, model, tmp_path):
    folder = shared / "data" / "arc_agi" / "training"
    (tmp_path / "tasks").mkdir()
    files = sorted(folder.glob("*.json"))[::4]
    for file in files:
        (tmp_path / "tasks" / file.name).symlink_to(file)
    options = ["data=arc", f"data.path={tmp_path / 'tasks'}", "data.include_solution=true"]
    _, texts = stored_texts(shared, model, tmp_path / "store", *options)
    encoder = grid_encoder(ArcData(path=str(folder)))
    tasks = {file.stem: json.loads(file.read_text()) for file in files}
    assert len(tasks) == 100
    assert len(texts) == sum(len(task["test"]) for task in tasks.values())
    for name, text in texts.items():
        task, _, test = name.partition("#")
        expected = [*tasks[task]["train"], tasks[task]["test"][int(test)]]
        found = decode_prompt(text, encoder)
        assert [np.array(pair.input).tolist() for pair in found] == [pair["input"] for pair in expected]
        assert [np.array(pair.output).tolist() for pair in found] == [pair["output"] for pair in expected]
