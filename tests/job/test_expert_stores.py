"""Stores of a model with experts: routers and experts."""

import numpy as np
import pytest

from pipeline.core.errors import ConfigError
from pipeline.core.sites import ActivationKey, Site
from pipeline.store import ActivationStore
from pipeline.store.check.verifying import verify_store
from tests.jobs import run_here, write_random_model, write_text

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
