import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.models.attention.spec import AttentionSpec
from pipeline.models.attention.xla import attend_xla

SEGMENTS = np.array([[1, 1, 1, 2, 2, 0, 0], [0, 0, 0, 0, 0, 0, 0], [1, 2, 3, 3, 3, 3, 3]], np.int32)


def inputs(num_heads: int, num_kv_heads: int, dtype=np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = [(3, 7, heads, 8) for heads in (num_heads, num_kv_heads, num_kv_heads)]
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def one_by_one(q, k, v, segments, causal: bool, scale=None, softcap=None, window=1000, sinks=None) -> np.ndarray:
    """Attention written with loops, in float64."""
    scale = scale or q.shape[3] ** -0.5
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    group = q.shape[2] // k.shape[2]
    for row, t, head in np.ndindex(q.shape[:3]):
        within = range(t - window + 1, t + 1) if causal else range(q.shape[1])
        keys = [s for s in range(q.shape[1]) if segments[row, s] == segments[row, t] and s in within]
        scores = np.array([q[row, t, head] @ k[row, s, head // group] for s in keys]) * scale
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        weights = np.exp(scores - scores.max())
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[head] - scores.max()))
        out[row, t, head] = sum(w * v[row, s, head // group] for w, s in zip(weights / total, keys, strict=True))
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_attention_equals_loops(num_heads: int, num_kv_heads: int, causal: bool) -> None:
    q, k, v = inputs(num_heads, num_kv_heads)
    got = attend_xla(q, k, v, jnp.array(SEGMENTS), AttentionSpec(causal, scale=8**-0.5))
    np.testing.assert_allclose(got, one_by_one(q, k, v, SEGMENTS, causal), atol=2e-6)


@pytest.mark.parametrize("rule", [{"window": 1}, {"window": 3}, {"softcap": 2.0}, {"scale": 0.1, "softcap": 0.5}])
def test_windows_scales_and_caps_equal_loops(rule: dict) -> None:
    q, k, v = inputs(4, 2)
    got = attend_xla(q, k, v, jnp.array(SEGMENTS), AttentionSpec(causal=True, **{"scale": 8**-0.5} | rule))
    np.testing.assert_allclose(got, one_by_one(q, k, v, SEGMENTS, True, **rule), atol=2e-6)


SINKS = {"near": [0.5, -1.0, 0.0, 2.0], "dominating": [60.0, 200.0, 90.0, 120.0], "negligible": [-300.0] * 4}


@pytest.mark.parametrize("rule", [{}, {"window": 3}, {"softcap": 2.0}])
@pytest.mark.parametrize("sinks", SINKS.values(), ids=SINKS.keys())
def test_sinks_take_their_share_of_the_attention(sinks: list[float], rule: dict) -> None:
    q, k, v = inputs(4, 2)
    spec = AttentionSpec(causal=True, **{"scale": 8**-0.5} | rule)
    got = attend_xla(q, k, v, jnp.array(SEGMENTS), spec, jnp.array(sinks))
    expected = one_by_one(q, k, v, SEGMENTS, True, **rule, sinks=sinks)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=2e-6)
    without = attend_xla(q, k, v, jnp.array(SEGMENTS), spec)
    assert np.array_equal(got, without) == (sinks[0] == -300)


def test_scores_do_not_overflow_in_bfloat16() -> None:
    q, k, v = inputs(4, 2, jnp.bfloat16)
    got = attend_xla(q * 200, k * 200, v, jnp.array(SEGMENTS), AttentionSpec(causal=True, scale=8**-0.5))
    assert got.dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(got, np.float32)).all()


@pytest.mark.parametrize(("length", "window"), [(1, 9), (127, 20), (128, 1000), (129, 1000), (300, 1000), (300, 100)])
def test_blocks_of_queries_are_joined_in_order(length: int, window: int) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(1, length, heads, 8)), jnp.float32) for heads in (2, 1, 1))
    segments = np.sort(rng.integers(1, 4, (1, length), dtype=np.int32), axis=1)
    got = attend_xla(q, k, v, jnp.array(segments), AttentionSpec(causal=True, scale=8**-0.5, window=window))
    np.testing.assert_allclose(got, one_by_one(q, k, v, segments, causal=True, window=window), atol=2e-6)
