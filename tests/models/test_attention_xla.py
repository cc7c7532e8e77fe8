"""Attention as matrix products, its patterns and their entropy, against loops in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.models.attention import xla
from pipeline.models.attention.pattern import attention_entropy, attention_pattern
from pipeline.models.attention.spec import AttentionInputs, AttentionSpec
from pipeline.models.attention.xla import attend_xla

attend = jax.jit(attend_xla, static_argnums=1)
entropy = jax.jit(attention_entropy, static_argnums=1)
pytestmark = pytest.mark.heavy
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0, 0], [0, 0, 0, 0, 0, 0, 0], [1, 2, 3, 3, 3, 3, 3]], np.int32)
SINKS = {"near": [0.5, -1.0, 0.0, 2.0], "dominating": [60.0, 200.0, 90.0, 120.0], "negligible": [-300.0] * 4}
RULES = {
    "causal": {},
    "full": {"causal": False},
    "window of one": {"window": 1},
    "window": {"window": 3},
    "capped": {"softcap": 2.0},
    "scaled and capped": {"scale": 0.1, "softcap": 0.5},
    "full and capped": {"causal": False, "softcap": 2.0},
}


def random_inputs(segments: np.ndarray, heads: tuple[int, int], sinks: list[float] | None = None) -> AttentionInputs:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(*segments.shape, number, 8)), jnp.float32) for number in (*heads, heads[1]))
    return AttentionInputs(q, k, v, jnp.array(segments), None if sinks is None else jnp.array(sinks))


def attention_spec(causal: bool = True, scale: float = 8**-0.5, **rule: float) -> AttentionSpec:
    return AttentionSpec(causal, scale, **rule)


def one_by_one(inputs: AttentionInputs, spec: AttentionSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The outputs, and of each query the attention to each position of its row [B, T, N, S], and its entropy."""
    q, k, v = (np.asarray(x, np.float64) for x in inputs[:3])
    segments, length = np.asarray(inputs.segments), q.shape[1]
    patterns, entropies = np.zeros((*q.shape[:3], length)), np.zeros(q.shape[:3])
    for row, t, head in np.ndindex(q.shape[:3]):
        within = range(t - (spec.window or length) + 1, t + 1) if spec.causal else range(length)
        keys = [s for s in range(length) if segments[row, s] == segments[row, t] and s in within]
        scores = np.array([q[row, t, head] @ k[row, s, head * k.shape[2] // q.shape[2]] for s in keys]) * spec.scale
        scores = spec.softcap * np.tanh(scores / spec.softcap) if spec.softcap else scores
        scores = scores if inputs.sinks is None else np.append(scores, inputs.sinks[head])
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        patterns[row, t, head, keys] = weights[: len(keys)]
        entropies[row, t, head] = -(weights * np.log(np.maximum(weights, 1e-300))).sum()
    values = np.repeat(v, q.shape[2] // k.shape[2], axis=2)
    return np.einsum("btns,bsnh->btnh", patterns, values), patterns, entropies


@pytest.mark.parametrize("sinks", [None, *SINKS.values()], ids=["", *SINKS])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_attention_equals_loops(rule: dict, sinks: list[float] | None) -> None:
    inputs, spec = random_inputs(SEGMENTS, (4, 2), sinks), attention_spec(**rule)
    z, patterns, entropies = one_by_one(inputs, spec)
    np.testing.assert_allclose(attend(inputs, spec), z, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(entropy(inputs, spec), entropies, atol=1e-5)
    selected = np.array([[4, 3, 1], [-1, -1, -1], [6, 2, 0]], np.int32)
    got = np.asarray(jax.jit(attention_pattern, static_argnums=3)(inputs, inputs.segments, selected, spec))
    for row, slot in ((0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (2, 2)):
        query = selected[row, slot]
        start = list(SEGMENTS[row]).index(SEGMENTS[row, query])  # the pattern begins with the query's segment
        np.testing.assert_allclose(got[row, slot], np.roll(patterns[row, query], -start, axis=-1), atol=1e-6)


@pytest.mark.parametrize("heads", [(4, 4), (6, 1)])
def test_heads_share_keys_and_values(heads: tuple[int, int]) -> None:
    inputs, spec = random_inputs(SEGMENTS, heads), attention_spec()
    np.testing.assert_allclose(attend(inputs, spec), one_by_one(inputs, spec)[0], atol=2e-6)


def test_scores_do_not_overflow_in_bfloat16() -> None:
    inputs = random_inputs(SEGMENTS, (4, 2))
    q, k, v = (x.astype(jnp.bfloat16) for x in inputs[:3])
    got = attend(inputs._replace(q=q * 200, k=k * 200, v=v), attention_spec())
    assert got.dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(got, np.float32)).all()


@pytest.mark.parametrize(("length", "window"), [(1, 9), (127, 20), (129, 1000), (300, 100)])
def test_blocks_of_queries_are_joined_in_order(length: int, window: int) -> None:
    segments = np.sort(np.random.default_rng(1).integers(1, 4, (1, length), dtype=np.int32), axis=1)
    inputs, spec = random_inputs(segments, (2, 1)), attention_spec(window=window)
    z, _, entropies = one_by_one(inputs, spec)
    np.testing.assert_allclose(attend(inputs, spec), z, atol=2e-6)
    np.testing.assert_allclose(entropy(inputs, spec), entropies, atol=1e-5)


@pytest.mark.parametrize("window", [None, 300])
def test_blocks_of_long_rows_are_computed_in_parts(window: int | None, monkeypatch) -> None:
    segments = np.repeat([[1, 2, 3, 0]], [700, 100, 3200, 96], axis=1).astype(np.int32)
    inputs, spec = random_inputs(segments, (2, 1)), attention_spec(window=window)
    whole = jax.jit(attend_xla, static_argnums=1)(inputs, spec)
    monkeypatch.setattr(xla, "_MOST_SCORE_BYTES", 1 << 20)
    compiled = jax.jit(lambda inputs: attend_xla(inputs, spec)).lower(inputs).compile()
    np.testing.assert_allclose(compiled(inputs), whole, atol=1e-6)
    assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 4096 * 2 * 4 / 4
