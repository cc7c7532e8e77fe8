"""Beam search compared with transformers, and what it excludes."""

from functools import partial

import numpy as np
import pytest

from tests.job.generation.test_generator import completed_samples, generator, prompts, save
from tests.models.hf_reference import torch

pytestmark = pytest.mark.heavy
NUM_NEW = 14
MANY = tuple(range(0, 199, 12))  # end tokens, with which searches end early, at different steps


def best_of_transformers(reference, tokens: np.ndarray, num_beams: int, end_tokens: tuple[int, ...]) -> list:
    """The completions and their scores."""
    ids = torch.from_numpy(tokens[None].astype(np.int64))
    options = {"num_beams": num_beams, "num_return_sequences": num_beams, "do_sample": False, "pad_token_id": 0}
    found = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_NEW,
        eos_token_id=list(end_tokens) or None,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    completions = []
    for row in found.sequences[:, tokens.size :].numpy():
        ends = np.flatnonzero(np.isin(row, end_tokens))
        completions.append(row[: ends[0] + 1] if len(ends) else row)
    return list(zip(completions, found.sequences_scores.tolist(), strict=True))


slow = partial(pytest.param, marks=pytest.mark.slow)  # transformers generates one prompt at a time


@pytest.mark.parametrize(
    ("family", "num_beams", "end_tokens", "num_prompts"),
    [
        ("qwen2", 3, MANY, 5),
        ("lfm2", 2, MANY, 3),  # convolutions, whose inputs are reordered
        *(slow(family, 3, MANY, 20) for family in ("qwen2", "gemma2", "lfm2", "qwen3_5_text", "gpt2", "nemotron_h")),
        slow("gemma3_text", 4, (5,), 20),
        slow("deepseek_v3", 4, (), 20),
    ],
)
def test_beams_equal_those_of_transformers(family: str, num_beams: int, end_tokens, num_prompts: int, tmp_path) -> None:
    """More prompts than fit in the rows."""
    reference = save(family, tmp_path)
    reference.generation_config.eos_token_id = None
    some = prompts(num_prompts, seed=num_prompts)
    options = {"rows": (num_prompts // 4 + 1) * num_beams, "max_new_tokens": NUM_NEW, "segment_steps": 5}
    compiled = generator(tmp_path, samples=num_beams, is_beam_search=True, end_tokens=end_tokens, **options)
    found = completed_samples(compiled, some)
    assert len(found) == num_prompts * num_beams
    lengths = set()
    for prompt in some:
        expected = best_of_transformers(reference, prompt.tokens, num_beams, end_tokens)
        for beam, (tokens, score) in enumerate(expected):
            got = found[prompt.number, beam]
            np.testing.assert_array_equal(got.tokens, tokens, err_msg=f"{prompt.number} {beam}")
            assert got.score == pytest.approx(score, abs=2e-5)
            assert got.finish_reason == ("stop" if tokens[-1] in end_tokens else "length")
            lengths.add(len(tokens))
    assert len(lengths) > 1 or len(end_tokens) < 2
