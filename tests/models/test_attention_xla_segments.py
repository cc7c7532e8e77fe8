"""Attention by segments against the reference, over rows of several blocks of 256."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import AxisType

from pipeline.models.attention.spec import AttentionSpec
from pipeline.models.attention.xla import attend_xla
from pipeline.models.attention.xla_segments import attend_xla_segments
from tests.models.packings import packings

LENGTH = 1024
RULES = {
    "causal": ({"causal": True}, (4, 2)),
    "full": ({"causal": False}, (2, 2)),
    "window": ({"causal": True, "window": 257}, (2, 1)),
    "window of one": ({"causal": True, "window": 1}, (1, 1)),
    "window and cap": ({"causal": True, "window": 300, "softcap": 1.0}, (3, 1)),
}
WITH_SINKS = ("full", "window and cap")


def inputs(num_heads: int, num_kv_heads: int, dtype: str) -> list[jax.Array]:
    """Queries, keys and values. Without groups, values are narrower than keys, as in latent attention."""
    rng = np.random.default_rng(0)
    sizes = (num_heads, 8), (num_kv_heads, 8), (num_kv_heads, 5 if num_heads == num_kv_heads else 8)
    return [jnp.asarray(rng.normal(size=(2, LENGTH, *size)), dtype) for size in sizes]


def compiled(spec: AttentionSpec) -> list[Callable[..., jax.Array]]:
    """Attention by segments, and the reference."""
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    return [jax.jit(partial(each, spec=spec)) for each in (partial(attend_xla_segments, mesh=mesh), attend_xla)]


@pytest.mark.parametrize("name", RULES)
def test_results_equal_the_reference(name: str) -> None:
    """Causal attention with sinks is compared on four devices (`test_attention_splash.py`)."""
    rule, heads = RULES[name]
    spec = AttentionSpec(**rule, scale=0.3)
    attend, reference = compiled(spec)
    q, k, v = inputs(*heads, "float32")
    sinks = jnp.array([-1.0, 0.0, 2.0, 30.0][-heads[0] :]) if name in WITH_SINKS else None

    @settings(max_examples=10, deadline=None)
    @given(segments=packings(LENGTH, 300))
    def check(segments: np.ndarray) -> None:
        got, expected = (np.asarray(each(q, k, v, segments, sinks=sinks)) for each in (attend, reference))
        np.testing.assert_allclose(got[segments != 0], expected[segments != 0], atol=2e-6)
        assert np.isfinite(got).all()

    check()


def test_bfloat16_is_as_exact_as_the_reference() -> None:
    q, k, v = inputs(4, 2, "bfloat16")
    segments = jnp.asarray(np.repeat([[1] * 700 + [2] * 300 + [0] * 24], 2, axis=0), "int32")
    spec = AttentionSpec(causal=True, scale=0.3)
    attend, reference = compiled(spec)
    got, exact = attend(q, k, v, segments), reference(*(x.astype(jnp.float32) for x in (q, k, v)), segments)
    assert got.dtype == jnp.bfloat16
    error, reference_error = (
        np.abs(np.asarray(z, np.float32) - exact)[:, :1000].mean() for z in (got, reference(q, k, v, segments))
    )
    assert error <= 1.1 * reference_error < 1e-3
