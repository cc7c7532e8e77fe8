"""The chunked delta rule, and the rule of Mamba 2, against their definitions, position by position in float64."""

import jax
import numpy as np
import pytest

from pipeline.job.generation.cache import CachedHistory, PromptHistory
from pipeline.models.partition import Partition
from pipeline.models.recurrent.delta_net import DECAY_RULE, DELTA_RULE
from pipeline.models.recurrent.recur import Heads, Rule, convolution

pytestmark = pytest.mark.heavy
ROWS, HEADS, VALUES = 2, 2, 2  # rows, key heads, value heads per key head
KEY_DIM, VALUE_DIM = 6, 10


RULES = pytest.mark.parametrize("rule", [DELTA_RULE, DECAY_RULE], ids=["delta", "mamba"])


def recurrence(rule: Rule, segments: np.ndarray, heads: Heads) -> np.ndarray:
    """A rule by its definition. A document's state begins at 0."""
    q, k, v, write, log_decay = (np.asarray(x, np.float64) for x in heads)
    outputs = np.zeros(v.shape)
    for row, positions in enumerate(segments):
        for place in np.ndindex(HEADS, VALUES):
            state = np.zeros((KEY_DIM, VALUE_DIM))
            for t, segment in enumerate(positions):
                if t and segment != positions[t - 1]:
                    state[:] = 0
                state *= np.exp(log_decay[row, t, *place])
                key = k[row, t, place[0]]
                known = key @ state if rule is DELTA_RULE else 0
                state += write[row, t, *place] * np.outer(key, v[row, t, *place] - known)
                outputs[row, t, *place] = q[row, t, place[0]] @ state
    return outputs


def random_heads(length: int, key_noise: float, decay: float) -> Heads:
    """Random inputs. Keys and queries have norm 1; with little noise, keys are similar."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, ROWS, length, HEADS, KEY_DIM))
    k = rng.normal(size=(HEADS, KEY_DIM)) + key_noise * k
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    write, time = rng.uniform(size=(2, ROWS, length, HEADS, VALUES))
    heads = q, k, rng.normal(size=(ROWS, length, HEADS, VALUES, VALUE_DIM)), np.sqrt(write), -decay * time
    return Heads(*(np.asarray(x, np.float32) for x in heads))


BORDERS = {  # the length, and the first positions of each row's documents, the last of which is padding; chunks have 64
    "one document": (150, [0], [0]),
    "a part of a chunk": (40, [0, 1, 17], [0, 39]),
    "several in chunks, padding": (200, [0, 3, 64, 127, 128, 190], [0, 63, 65, 66]),
}


@RULES
@pytest.mark.parametrize("borders", BORDERS)
@pytest.mark.parametrize(("key_noise", "decay"), [(10.0, 0.1), (10.0, 5.0), (0.01, 0.001)])
def test_chunks_equal_the_recurrence(rule: Rule, borders: str, key_noise: float, decay: float) -> None:
    length, *starts = BORDERS[borders]
    segments = np.array([[sum(start <= t for start in row) for t in range(length)] for row in starts], np.int32)
    if len(starts[0]) > 1:
        segments[segments == segments.max(axis=1, keepdims=True)] = 0
    heads = random_heads(length, key_noise, decay)
    got, _ = jax.jit(rule.rows)(segments, heads)
    expected = recurrence(rule, segments, heads)
    assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()


@RULES
def test_a_prompt_and_the_steps_after_it_equal_whole_rows(rule: Rule) -> None:
    """Wherever the prompt ends. An inactive row keeps its state."""
    length, num_taps = 150, 4
    heads = random_heads(length, 10.0, 0.1)
    x = np.random.default_rng(1).normal(size=(ROWS, length, HEADS, KEY_DIM)).astype("float32")
    taps = np.random.default_rng(2).normal(size=(HEADS, KEY_DIM, 1, num_taps)).astype("float32")
    ones, partition = np.ones((ROWS, length), np.int32), Partition()
    expected, convolved = recurrence(rule, ones, heads), convolution(x, taps, ones)
    step = jax.jit(lambda cache, is_active, *inputs: _stepped(rule, CachedHistory(cache, is_active), taps, *inputs))
    for ends in ([1, 150], [3, 64], [65, 128]):
        prompt = PromptHistory(np.array(ends))
        segments = (np.arange(length) < np.array(ends)[:, None]).astype("int32")
        for name in "qkv":
            prompt.convolve(name, x, taps, segments)
        outputs = prompt.outputs(rule, segments, heads, partition)
        cache, positions = prompt.cache, np.array(ends)
        for row, end in enumerate(ends):
            np.testing.assert_allclose(outputs[row, :end], expected[row, :end], atol=1e-5)
        while (is_active := positions < length).any() and positions.min() < min(ends) + 9:
            at = np.arange(ROWS), np.minimum(positions, length - 1)
            inputs = jax.tree.map(lambda values, at=at: values[at][:, None], (x, heads))
            before, (latest, out, cache) = cache, step(cache, is_active, *inputs)
            for row in np.flatnonzero(is_active):
                np.testing.assert_allclose(latest[row, 0], convolved[row, positions[row]], atol=1e-5)
                np.testing.assert_allclose(out[row, 0], expected[row, positions[row]], atol=1e-5)
            for row in np.flatnonzero(~is_active):
                assert all((cache[name][row] == old[row]).all() for name, old in before.items())
            positions += is_active


def _stepped(rule: Rule, layer: CachedHistory, taps: np.ndarray, x: jax.Array, heads: Heads) -> tuple:
    segments = np.ones((ROWS, 1), np.int32)
    latest = [layer.convolve(name, x, taps, segments) for name in "qkv"][-1]
    return latest, layer.outputs(rule, segments, heads, Partition()), layer.cache
