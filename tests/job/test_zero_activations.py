"""A model whose activations and outputs are all 0: job, store and readers work as for any other."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.store import ActivationStore
from pipeline.store.check.verifying import verify_store
from tests.jobs import run_here, write_model_of_zeros, write_text
from tests.store.written_check import assert_well_written

pytestmark = pytest.mark.heavy
MLP_OUT = "blocks.1.mlp_out"
ALL_ZERO = {MLP_OUT, f"{MLP_OUT}.scale", "entropy", "top_logprobs"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    """The store, made in two runs."""
    folder = tmp_path_factory.mktemp("zeros")
    model = write_model_of_zeros(folder / "model")
    job = (
        *(f"model.path={model}", f"data.path={write_text(folder / 'text', files=2, documents=6)}"),
        *(f"store.path={folder / 'store'}", "data.num_streams=2", "batch.rows=2", "batch.length=32"),
        *("capture.layers=[1]", "capture.sites=[mlp_out,resid_post]", "capture.dtype=int8", "store.shard_mib=0.004"),
        *("capture.positions=every", "capture.every=5", "capture.outputs=[entropy,top_logprobs]"),
        "capture.top_logprobs=1",
    )
    run_here(*job, "run.max_tokens=1000")
    assert verify_store(str(folder / "store")) == []
    run_here(*job)
    return ActivationStore.open(folder / "store")


def test_a_block_of_zeros_is_an_object_of_an_index_alone(store):
    assert verify_store(store.path) == []
    assert_well_written(store.path)
    for name in store.arrays:
        objects = store.storage.list_keys(f"{name}/c.")
        assert len(objects) == len(store.blocks)
        is_index = [content[:8] == b"\xff" * 8 for content in store.storage.read_many(objects)]
        assert all(is_index) == (name in ALL_ZERO), name


def test_readers_return_zeros(store):
    valid = store.read_selected(store.rows) >= 0
    assert not store.read("blocks.1.mlp_out", store.rows).any()
    assert store.read("blocks.1.resid_post", store.rows)[valid].any(axis=1).all()
    outputs = store.read_outputs(store.rows)
    assert {name: values.any() for name, values in outputs.items()} == {
        **{"entropy": False, "top_logprobs": False},
        "top_ids": True,
    }
    assert store.statistics("blocks.1.mlp_out").count == store.num_activations
    assert not store.statistics("blocks.1.mlp_out").variance.any()
    for options in ({}, {"shuffle": True, "buffer_mib": 0.1}):
        batches = list(store.batches(["blocks.1.resid_post", MLP_OUT], 64, outputs=("entropy", "top_ids"), **options))
        assert sum(len(batch.tokens) for batch in batches) == store.num_activations
        for batch in batches:
            assert not batch.activations[MLP_OUT].any()
            assert batch.activations["blocks.1.resid_post"].any(axis=1).all()
            assert not batch.outputs["entropy"].any()
            assert batch.outputs["top_ids"].any()
    document = store.document(0)
    assert len(document.activations[MLP_OUT]) == len(document.tokens) > 0
    assert not document.activations[MLP_OUT].any()


def test_documents_of_one_token_have_attention_without_entropy(tmp_path):
    """They attend only to themselves, and all positions are 0."""
    (tmp_path / "text").mkdir()
    pq.write_table(pa.table({"text": list("abcdefgh"), "id": list("abcdefgh")}), tmp_path / "text" / "0.parquet")
    job = ("batch.rows=2", "batch.length=8", "capture.layers=[0,3]", "capture.sites=[attn_entropy,attn_z]")
    run_here(f"data.path={tmp_path / 'text'}", f"store.path={tmp_path / 'store'}", *job)
    assert verify_store(str(tmp_path / "store")) == []
    store = ActivationStore.open(tmp_path / "store")
    [batch] = store.batches(["blocks.0.attn_entropy", "blocks.3.attn_z"], 8)
    assert not batch.activations["blocks.0.attn_entropy"].any()
    assert not batch.positions.any()
    assert batch.activations["blocks.3.attn_z"].any(axis=1).all()
    assert store.read("blocks.3.attn_entropy", store.rows).shape[2] == 4
