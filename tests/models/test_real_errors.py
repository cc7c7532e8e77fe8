"""The errors of storing activations, and of quantised weights, for real models on real text, as in docs/performance.md.

`pytest -m slow -s tests/models/test_real_errors.py` prints them.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.core.sites import FINAL_NORM, ActivationKey, Site, activation_keys
from pipeline.job.rounding import rounding_errors
from pipeline.models.registry import Model, open_model
from pipeline.models.token_outputs import token_outputs
from pipeline.step.stored_values import numbers, to_stored
from tests.jobs import ROOT
from tests.models.real_weights import convert, gguf_file

pytestmark = pytest.mark.slow
PROSE = sorted((ROOT.parent / "shared" / "data" / "prose").glob("*.parquet"))
ROWS, LENGTH = 8, 256
MODELS = ("smollm2", "gemma3")
STORED = [("bfloat16", None), ("float16", None), *(("int8", group) for group in (None, 64, 32))]
STORED += [("float8_e4m3fn", group) for group in (None, 64, 32)]
DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


@functools.cache
def opened(name: str, folder: Path) -> tuple[Model, np.ndarray]:
    """A model and rows of its tokens."""
    pytest.importorskip("gguf")
    file = gguf_file(name, folder)
    if file is None or not PROSE:
        pytest.skip("the package with the weights, or the text, is not there")
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    convert(file, folder)
    texts = pq.ParquetFile(PROSE[0]).read_row_group(0, ["text"])["text"].to_pylist()
    rows = (tokenizer(text, truncation=True, max_length=LENGTH).input_ids for text in texts)
    tokens = [row for row in rows if len(row) == LENGTH][:ROWS]
    return open_model(str(folder)), np.array(tokens, np.int32)


def captured(model: Model, tokens: np.ndarray, keys: tuple[ActivationKey, ...], **head: bool) -> tuple[dict, dict]:
    params = model.load(keys, "float32", DEVICE, **head)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (len(tokens), 1))
    apply = jax.jit(model.apply, static_argnames="keys")
    return apply(params, jnp.array(tokens), jnp.ones_like(tokens), jnp.array(positions), keys=keys), params


def layers(model: Model) -> tuple[int, ...]:
    return (1, model.num_layers // 2, model.num_layers - 1)


@pytest.mark.parametrize("name", MODELS)
def test_errors_of_storing(name: str, tmp_path_factory) -> None:
    model, tokens = opened(name, tmp_path_factory.getbasetemp())
    keys = activation_keys(layers(model), (Site.attn_out, Site.mlp_out, Site.resid_post))
    found, params = captured(model, tokens, (*keys, FINAL_NORM), with_head=True)
    outputs = token_outputs(model.head, params, found[FINAL_NORM], jnp.roll(jnp.array(tokens), -1, axis=1), 0)
    assert np.asarray(outputs.loss)[:, :-1].mean() < 4  # nats: it is the real model
    print(
        f"\n{name}: dtype, group; all, median and worst token, cosine of the median and the worst token, in thousandths"
    )
    for key in keys:
        x = found[key]
        exact = np.asarray(x, np.float64).reshape(-1, x.shape[-1])
        print(f"{key.name}, largest |x| {np.abs(exact).max():.0f}, median |x| {np.median(np.abs(exact)):.3g}")
        for dtype, group in STORED:
            held = numbers(jax.jit(to_stored, static_argnums=(1, 2, 3))(x, dtype, group, False))
            got = np.asarray(held, np.float64).reshape(exact.shape)
            norms = np.linalg.norm(exact, axis=1)
            errors = np.linalg.norm(got - exact, axis=1) / norms
            cosines = (got * exact).sum(axis=1) / np.maximum(np.linalg.norm(got, axis=1) * norms, 1e-30)
            whole = np.linalg.norm(got - exact) / np.linalg.norm(exact)
            figures = (whole, np.median(errors), errors.max(), 1 - np.median(cosines), 1 - cosines.min())
            print(f"  {dtype:14}{group or '':4}", *(f"{1e3 * figure:8.2f}" for figure in figures))
            assert np.isfinite(got).all()
            if dtype == "float8_e4m3fn":
                assert np.median(errors) < 0.04


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_errors_of_quantised_weights(name: str, dtype: str, tmp_path_factory) -> None:
    model, tokens = opened(name, tmp_path_factory.getbasetemp())
    keys = activation_keys(layers(model), (Site.attn_out, Site.mlp_out, Site.resid_post))
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (len(tokens), 1))
    rows = {"tokens": tokens, "segments": np.ones_like(tokens), "positions": positions}
    errors = rounding_errors(model, keys, rows, "float32", dtype)
    print(f"\n{name}, {dtype} weights: { ({key.name: e for key, e in errors.items()}) }")
    assert errors[keys[-1]]
