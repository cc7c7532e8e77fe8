"""Stores of models with experts, and of a model whose activations and outputs are all 0."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.core.errors import ConfigError
from pipeline.core.sites import ActivationKey, Site
from pipeline.store import ActivationStore
from pipeline.store.check.verifying import verify_store
from tests.jobs import run_here, write_model_of_zeros, write_random_model, write_text
from tests.store.written_check import assert_well_written

pytestmark = pytest.mark.heavy
SHAPE = {
    **{"model_type": "qwen3_moe", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
    **{"num_hidden_layers": 3, "num_key_value_heads": 2, "mlp_only_layers": [1]},
    **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
}
SITES = "router_logits,router_weights,router_indices,expert_out,mlp_out,mlp_post"


@pytest.fixture(scope="module")
def overrides(tmp_path_factory, compilation_cache) -> list[str]:
    path = tmp_path_factory.mktemp("experts")
    text = write_text(path / "text", files=2, documents=20)
    model = write_random_model(path / "model", **SHAPE)
    sizes = ["batch.rows=4", "batch.length=64", "store.shard_mib=0.25", "run.max_tokens=4000"]
    return [f"data.path={text}", *model, *sizes, "capture.layers=all", f"capture.sites=[{SITES}]", compilation_cache]


@pytest.fixture(scope="module")
def path(overrides, tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "store"
    run_here(*overrides, f"store.path={path}", "capture.dtype=float32")
    return path


def test_stored_logits_weights_indices_and_experts_agree(path) -> None:
    assert verify_store(str(path)) == []
    store = ActivationStore.open(str(path))
    routed = SITES.split(",")[:4]
    assert [key.name for key in store.keys] == [
        *(f"blocks.{layer}.{site}" for layer in (0,) for site in (*routed, "mlp_out")),
        *("blocks.1.mlp_post", "blocks.1.mlp_out"),
        *(f"blocks.2.{site}" for site in (*routed, "mlp_out")),
    ]
    segments = store.arrays["segments"][...].read().result()
    for layer in (0, 2):
        logits, weights, indices, experts, mlp_out = (
            store.read(f"blocks.{layer}.{site}", slice(None))[segments > 0] for site in (*routed, "mlp_out")
        )
        assert (indices.dtype, logits.dtype) == (np.int32, np.float32)
        np.testing.assert_array_equal(indices, np.argsort(-logits, axis=-1, kind="stable")[:, :2])
        chosen = np.exp(np.take_along_axis(logits, indices, axis=-1))
        np.testing.assert_allclose(weights, chosen / chosen.sum(axis=-1, keepdims=True), rtol=1e-5)
        mixed = np.einsum("tad,ta->td", experts.reshape(-1, 2, 32), weights)
        np.testing.assert_allclose(mixed, mlp_out, rtol=0, atol=1e-5 * np.abs(mlp_out).max())
        assert store.statistics(f"blocks.{layer}.router_indices").count == len(indices)


def test_batches_have_integer_indices_which_are_not_stacked_with_floats(path) -> None:
    store = ActivationStore.open(str(path))
    keys = [ActivationKey(2, Site.router_indices), ActivationKey(2, Site.router_weights)]
    batch = next(store.batches(keys, 100, seed=0))
    assert [batch.activations[key.name].dtype for key in keys] == [np.int32, np.float32]
    with pytest.raises(ValueError, match="stack=True needs equal widths and dtypes"):
        store.batches(keys, 100, stack=True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("capture.dtype=int8", "router_indices, whose values are integers, with capture.dtype=int8"),
        ("capture.layers=[0,1]", "with the site router_logits, which layer 1 lacks"),
    ],
)
def test_captures_that_cannot_be_stored_are_refused(overrides, override: str, message: str, tmp_path) -> None:
    with pytest.raises(ConfigError, match=message):
        run_here(*overrides, f"store.path={tmp_path}/store", override)


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
