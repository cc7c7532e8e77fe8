"""The error caused by quantised weights, as recorded in a store."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.config import composing
from pipeline.core.errors import StoreMismatch
from pipeline.core.sites import ActivationKey
from pipeline.job import rounding
from pipeline.job.opening import open_job
from pipeline.job.rounding import RoundingError, measure_rounding, rounding_errors
from pipeline.job.running import run
from pipeline.store import ActivationStore
from pipeline.store.inspection.summary import store_facts
from pipeline.store.write.store_writer import StoreWriter
from tests.jobs import write_random_model, write_text

pytestmark = pytest.mark.heavy
DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
SITES = "capture.sites=[embed,resid_pre,q,attn_z,attn_out,mlp_in,mlp_post,resid_post]"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"), files=2, documents=40)


def job_config(text, store, *overrides):
    base = [f"data.path={text}", f"store.path={store}", "batch.rows=4", "batch.length=128", "run.progress=false"]
    return composing.compose(
        [*base, "store.shard_mib=0.25", "run.max_tokens=3000", "model.weights_dtype=int8", *overrides]
    )


def direct_errors(job, rows, dtype: str) -> dict[ActivationKey, RoundingError]:
    """Computes the errors from two forward passes, with the original and with rounded weights."""
    keys, (tokens, segments, positions) = job.plan.step.keys, rows.values()
    captured = []
    for quantised in (None, job.config.model.quantised):
        params = job.model.load(keys, dtype, DEVICE, quantised=quantised)
        captured.append(
            jax.jit(job.model.apply, static_argnames="keys")(params, tokens, segments, positions, keys=keys)
        )
    errors = {}
    for key in keys:
        exact, got = (np.asarray(each[key].astype(jnp.float32))[segments != 0] for each in captured)
        got, exact = (values.reshape(len(values), -1) for values in (got, exact))
        each = np.linalg.norm(got - exact, axis=1) / np.linalg.norm(exact, axis=1)
        errors[key] = RoundingError(float(np.linalg.norm(got - exact) / np.linalg.norm(exact)), float(np.median(each)))
    return errors


@pytest.mark.parametrize(
    ("layers", "dtype", "weights_dtype", "tolerance"),
    [("[0,3]", "float32", "int8", 0.01), ("[3]", "bfloat16", "int8", 0.1), ("[3]", "float32", "int4", 0.01)],
)
def test_errors_equal_those_of_two_forward_passes(
    layers: str, dtype: str, weights_dtype: str, tolerance: float, text, tmp_path
) -> None:
    """In bfloat16 the two programs round at different places, hence the larger tolerance."""
    options = f"capture.layers={layers}", f"model.dtype={dtype}", f"model.weights_dtype={weights_dtype}"
    job = open_job(job_config(text, tmp_path / "store", *options, SITES))
    rows = job.first_rows(1024)
    assert {values.shape for values in rows.values()} == {(4, 128)}  # the first block
    got = rounding_errors(job.model, job.plan.step.keys, rows, dtype, job.config.model.quantised)
    expected = direct_errors(job, rows, dtype)
    assert list(got) == list(job.plan.step.keys)
    assert got[ActivationKey.parse("embed")] == expected[ActivationKey.parse("embed")] == (0, 0)
    low, high = (0.001, 0.02) if weights_dtype == "int8" else (0.02, 0.3)
    assert low < got[ActivationKey.parse("blocks.3.resid_post")].token_median < high
    for key, error in expected.items():
        assert got[key] == pytest.approx(error, rel=tolerance), key


def test_errors_of_layers_with_shared_keys_and_inputs_per_layer(text, tmp_path) -> None:
    shape = {"model_type": "gemma4_text", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 12}
    shape |= {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "num_kv_shared_layers": 1}
    model = write_random_model(tmp_path, **shape, hidden_size_per_layer_input=6, vocab_size_per_layer_input=2048)
    job = open_job(job_config(text, tmp_path / "store", *model, "capture.layers=all", "capture.sites=[q,resid_post]"))
    rows = job.first_rows(1024)
    got = rounding_errors(job.model, job.plan.step.keys, rows, "float32", job.config.model.quantised)
    for key, error in direct_errors(job, rows, "float32").items():
        assert got[key] == pytest.approx(error, rel=0.01), key


def test_a_store_records_the_error_once_and_refuses_another_weights_dtype(text, tmp_path, monkeypatch) -> None:
    measured = []
    monkeypatch.setattr(
        rounding, "rounding_errors", lambda *of, **what: measured.append(of) or rounding_errors(*of, **what)
    )
    options = ("capture.layers=[2]", "capture.sites=[resid_post,final_norm]")
    run(job_config(text, tmp_path / "whole", *options, "run.max_tokens=1000"))
    config = job_config(text, tmp_path / "whole", *options)
    run(config)
    assert len(measured) == 1
    store = ActivationStore.open(tmp_path / "whole")
    job = open_job(config)
    exact = direct_errors(job, job.first_rows(1024), "float32")
    for key, error in exact.items():
        assert store.weights_error[key.name] == pytest.approx(error._asdict(), rel=0.01)
    assert list(store.weights_error) == ["blocks.2.resid_post", "final_norm"]
    assert str(store.weights_error["final_norm"]["token_median"]) in store_facts(store)["int8"]

    with pytest.raises(StoreMismatch, match=r"model\.weights_dtype: the store has 'int8', this run asks for 'same'"):
        run(job_config(text, tmp_path / "whole", *options, "model.weights_dtype=same"))


def test_float_weights_have_no_error(text, tmp_path) -> None:
    job = open_job(job_config(text, tmp_path, "capture.layers=[0]", "model.weights_dtype=same"))
    measure_rounding(job, StoreWriter.open(job.storage, job.metadata, job.layout))
    store = ActivationStore.open(tmp_path)
    assert store.weights_error is None
    assert store.metadata.model["weights_dtype"] == "same"
