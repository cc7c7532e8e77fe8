"""Which tokens can be drawn, and their frequencies; proposed tokens compared with a search of each row, one place after
the other."""

import jax
import numpy as np
import pytest

from pipeline.job.generation.next_tokens import propose, sample, sample_keys
from pipeline.planning.generation_plan import Sampling
from tests.models.hf_reference import torch, transformers

pytestmark = pytest.mark.heavy
DRAWS, VOCABULARY = 20_000, 12
LOGITS = np.random.default_rng(0).normal(0, 2, VOCABULARY).astype(np.float32)
CASES = [
    Sampling(1.0),
    Sampling(0.7),
    Sampling(1.5, top_k=4),
    Sampling(1.0, top_k=1),
    Sampling(1.0, top_p=0.8),
    Sampling(2.0, top_p=0.05),
    Sampling(0.9, top_k=6, top_p=0.7, seed=5),
    Sampling(1.0, top_k=500),
]


def expected_probabilities(sampling: Sampling) -> np.ndarray:
    """The probabilities by transformers, whose processors run in the order of `generate`."""
    processors = transformers.LogitsProcessorList([transformers.TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k is not None:
        processors.append(transformers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None:
        processors.append(transformers.TopPLogitsWarper(sampling.top_p))
    scores = processors(torch.zeros((1, 1), dtype=torch.long), torch.from_numpy(LOGITS)[None])
    return torch.softmax(scores, -1)[0].numpy()


@pytest.mark.parametrize("sampling", CASES, ids=str)
def test_frequencies_match_the_probabilities_of_transformers(sampling: Sampling) -> None:
    numbers = np.arange(DRAWS, dtype=np.uint32)
    keys = sample_keys(sampling.seed, numbers >> 7, numbers, 1)[:, 0]
    drawn = jax.jit(sample, static_argnums=3)(np.tile(LOGITS, (DRAWS, 1)), keys, numbers % 64, sampling)
    expected = expected_probabilities(sampling)
    frequencies = np.bincount(drawn, minlength=VOCABULARY) / DRAWS
    assert not frequencies[expected == 0].any()
    deviations = np.sqrt(expected * (1 - expected) / DRAWS)
    assert (np.abs(frequencies - expected) <= 5 * deviations).all()


def test_greedy_sampling_takes_the_likeliest_token() -> None:
    keys = sample_keys(0, np.zeros(1, np.uint32), np.zeros(1, np.uint32), 1)[:, 0]
    assert sample(LOGITS[None], keys, np.zeros(1, np.int32), Sampling()) == np.argmax(LOGITS)


def test_keys_differ_with_the_seed_either_half_of_the_number_and_the_sample() -> None:
    high, low = np.meshgrid(np.arange(5, dtype=np.uint32), np.arange(5, dtype=np.uint32))
    keys = np.concatenate([sample_keys(seed, high.ravel(), low.ravel(), 3) for seed in (0, 1)])
    assert len(np.unique(keys.reshape(-1, 2), axis=0)) == 150


SLOTS = 24


def searched(text: list[int], num: int) -> list[int]:
    """The continuation of the last of the longest matches."""
    lengths = {
        end: next((size for size in (3, 2, 1) if size <= end and text[:end][-size:] == text[-size:]), 0)
        for end in range(1, len(text))
    }
    start = max(lengths, key=lambda end: (lengths[end], end))
    for _ in range(num):
        text = [*text, text[start]]
        start += 1
    return text[-num:]


@pytest.mark.parametrize("num", [1, 4])
def test_proposals_follow_the_latest_of_the_longest_matches(num: int) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, SLOTS + 1, 300)
    text = rng.integers(0, rng.integers(1, 9, 300)[:, None], (300, SLOTS), dtype=np.int32)
    found = jax.jit(propose, static_argnums=2)(text, lengths.astype(np.int32) - 1, num)
    expected = [searched(row[:length].tolist(), num) for row, length in zip(text, lengths, strict=True)]
    np.testing.assert_array_equal(found, expected)
