"""Completions compared with Hugging Face transformers and the extraction step, in batches of different shapes."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.cluster.sharding import make_mesh
from pipeline.core.errors import ConfigError
from pipeline.core.sites import ActivationKey, Site, activation_keys
from pipeline.job.generation.cache import attend_rounded
from pipeline.job.generation.decode import compile_programs
from pipeline.job.generation.generator import Completion, Generator, Prompt
from pipeline.models.attention.spec import AttentionInputs, AttentionSpec
from pipeline.models.attention.xla import attend_xla
from pipeline.models.partition import Partition
from pipeline.models.registry import open_model
from pipeline.planning.generation_plan import GenerationSpec, Sampling
from tests.models.hf_reference import VOCAB_SIZE, save_random, torch

pytestmark = pytest.mark.heavy
ROWS, MAX_PROMPT, NUM_NEW = 8, 20, 64
TWO_LAYERS = {"num_hidden_layers": 2}
GEMMA = TWO_LAYERS | {"head_dim": 6, "sliding_window": 7, "query_pre_attn_scalar": 12}
MSCALE_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 24}
MSCALE_ROPE |= {"mscale": 0.7, "mscale_all_dim": 1.3}
DELTA = TWO_LAYERS | {"layer_types": ["linear_attention", "full_attention"], "rms_norm_eps": 1e-2}
FAMILIES = {
    "deepseek_v3": TWO_LAYERS | {"rope_parameters": MSCALE_ROPE},  # latent
    "gemma2": GEMMA | {"final_logit_softcapping": 3.0},  # capped, local and global
    "gemma3_text": GEMMA | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 29},  # two RoPEs
    "gemma4_text": {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 3.0},  # shared keys
    "gpt2": {},  # learned positions
    "gpt_oss": TWO_LAYERS | {"sliding_window": 7},  # sinks
    "llama4_text": TWO_LAYERS | {"no_rope_layers": [1, 0], "attention_chunk_size": 29},  # chunks, scaled queries
    "lfm2": TWO_LAYERS | {"layer_types": ["conv", "full_attention"], "conv_bias": True},  # convolutions
    "mistral": TWO_LAYERS | {"sliding_window": 7},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "mlp"]},  # Mamba 2
    "qwen2": {"tie_word_embeddings": True},
    "qwen3_5_text": DELTA,
}
"""One family for each kind of cache and of positions. `test_parity.py` compares the layers of all families."""
SPECULATING = ("deepseek_v3", "gemma3_text", "gemma4_text", "gpt2", "gpt_oss", "llama4_text")
"""With 3 proposals, the local layers of Gemma 3 and Llama 4 have windows of 29 positions, and exactly 32 slots."""


def save(family: str, path: Path):
    return save_random(family, path, **{"num_hidden_layers": 1} | FAMILIES[family])


def generator(path: Path | str, keys: Sequence[ActivationKey] = (), *, quantised: str | None = None, **options: object):
    """A generator on the first device; greedy by default."""
    model, partition = open_model(str(path)), Partition(make_mesh(devices=jax.devices()[:1]))
    params = model.load_leaves(model.generation.leaves(keys), "float32", partition.leaf_sharding, quantised=quantised)
    defaults = {"rows": ROWS, "max_prompt": MAX_PROMPT, "max_new_tokens": NUM_NEW, "end_tokens": ()}
    spec = GenerationSpec(keys=tuple(keys), **defaults | {"sampling": Sampling()} | options)
    return Generator(compile_programs(model, params, partition, spec), params)


def prompts(num: int, vocab_size: int = VOCAB_SIZE, max_prompt: int = MAX_PROMPT, seed: int = 4) -> list[Prompt]:
    """Prompts of 1 to `max_prompt` tokens."""
    rng = np.random.default_rng(seed)
    lengths = [1, max_prompt, *rng.integers(1, max_prompt + 1, num)][:num]
    return [Prompt(7 * k, rng.integers(0, vocab_size, length, dtype=np.int32)) for k, length in enumerate(lengths)]


def completed_samples(generator: Generator, prompts: Sequence[Prompt]) -> dict[tuple[int, int], Completion]:
    return {(each.number, each.sample): each for each in generator.run(iter(prompts))}


def completed(generator: Generator, prompts: Sequence[Prompt]) -> dict[int, Completion]:
    found = list(generator.run(iter(prompts)))
    assert len(found) == len(prompts)
    return {each.number: each for each in found}


def attend_rounded_from(first: jax.Array, inputs: AttentionInputs, spec: AttentionSpec) -> jax.Array:
    is_exact = (jnp.arange(inputs.q.shape[1]) < first)[:, None, None]
    return jnp.where(is_exact, attend_xla(inputs, spec), attend_rounded(inputs, spec))


Extract = Callable[..., dict[ActivationKey, np.ndarray]]


def extraction(path: Path, keys: tuple[ActivationKey, ...], *, quantised: str | None = None) -> Extract:
    """A function that captures the activations of prompt and completion in a padded row. Tokens from `first_rounded` on
    attend to rounded keys and values."""
    model = open_model(str(path))
    params = model.load(keys, "float32", jax.sharding.SingleDeviceSharding(jax.devices()[0]), quantised=quantised)
    apply = jax.jit(lambda first, *batch: model.apply(params, *batch, keys, partial(attend_rounded_from, first)))

    def extract(
        prompt: Prompt, completion: Completion, first_rounded: int = MAX_PROMPT + NUM_NEW
    ) -> dict[ActivationKey, np.ndarray]:
        num_tokens = prompt.tokens.size + completion.tokens.size
        tokens, segments, positions = np.zeros((3, 1, MAX_PROMPT + NUM_NEW), np.int32)
        tokens[0, :num_tokens] = np.concatenate([prompt.tokens, completion.tokens])
        segments[0, :num_tokens] = 1
        positions[0] = np.arange(positions.size)
        captured = apply(first_rounded, tokens, segments, positions)
        return {key: np.asarray(values[0, :num_tokens]) for key, values in captured.items()}

    return extract


def assert_greedy(reference, prompts: Sequence[Prompt], found: dict[int, Completion]) -> None:
    """Asserts that each token is the likeliest after those before it, as in greedy `generate`."""
    whole = [np.concatenate([each.tokens, found[each.number].tokens]) for each in prompts]
    ids = np.zeros((len(whole), max(map(len, whole))), np.int64)
    for row, tokens in zip(ids, whole, strict=True):
        row[: tokens.size] = tokens
    with torch.no_grad():  # causal: padding on the right has no effect
        likeliest = reference(torch.from_numpy(ids)).logits.argmax(-1).numpy()
    for row, prompt in zip(likeliest, prompts, strict=True):
        got = found[prompt.number].tokens
        first = prompt.tokens.size - 1
        np.testing.assert_array_equal(row[first : first + got.size], got, err_msg=str(prompt.number))


@pytest.mark.parametrize(
    ("family", "num_prompts", "seed"),
    [
        *(
            (family, ROWS + 5, 4)
            for family in FAMILIES
            if family not in ("mistral", "qwen2", "qwen3_5_text")  # other tests use these
        ),
        *(pytest.param(family, 20, 11, marks=pytest.mark.slow) for family in (*SPECULATING, "qwen2", "lfm2")),
    ],
)
def test_greedy_completions_equal_those_of_transformers(family: str, num_prompts: int, seed: int, tmp_path) -> None:
    """More prompts than rows: some start in rows whose completions have ended. Attention reads blocks of slots."""
    reference = save(family, tmp_path)
    some = prompts(num_prompts, seed=seed)
    proposed = (3,) if family in SPECULATING else (0,)
    for num_proposed in proposed if num_prompts < 20 else {0, *proposed}:
        compiled = generator(tmp_path, block=16, speculate=num_proposed)
        found = completed(compiled, some)
        assert all((each.tokens.size, each.finish_reason) == (NUM_NEW, "length") for each in found.values())
        assert_greedy(reference, some, found)
        assert compiled.counts.tokens == len(some) * NUM_NEW
        assert (compiled.counts.tokens_per_step > 1) == (num_proposed > 0)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save("mistral", path)
    return path


def test_completions_with_int8_weights_are_greedy(path: Path) -> None:
    """Greedy with respect to the rounded weights."""
    some = prompts(3)
    found = completed(generator(path, quantised="int8"), some)
    extract = extraction(path, (ActivationKey(-1, Site.final_norm),), quantised="int8")
    head = open_model(str(path)).checkpoint.rows("lm_head.weight", 0, VOCAB_SIZE)
    for prompt in some:
        got = found[prompt.number].tokens
        (final,) = extract(prompt, found[prompt.number]).values()
        first = prompt.tokens.size - 1
        np.testing.assert_array_equal(np.argmax(final @ head.T, -1)[first : first + got.size], got)


DRAWN = {"sampling": Sampling(temperature=0.8, top_k=50, top_p=0.9, seed=3), "end_tokens": (0, 1, 2, 3)}


@pytest.fixture(scope="module")
def drawing(path: Path) -> Generator:
    return generator(path, **DRAWN)


def test_a_completion_depends_on_seed_and_document_alone(path: Path, drawing: Generator) -> None:
    """And not on the number of rows, the order, the neighbours, the length of a segment, blocks or proposals."""
    some = prompts(13)
    found = completed(drawing, some)
    assert {each.finish_reason for each in found.values()} == {"stop", "length"}
    assert len({each.tokens.size for each in found.values()}) > 5
    for each in found.values():
        ends = np.isin(each.tokens, DRAWN["end_tokens"])
        assert not ends[:-1].any()
        assert ends[-1] == (each.finish_reason == "stop")
        assert each.finish_reason == "stop" or each.tokens.size == NUM_NEW
    other = generator(path, **DRAWN, rows=3, segment_steps=5, block=16, speculate=2)
    others = completed(other, some[::-1])
    for number, each in found.items():
        np.testing.assert_array_equal(others[number].tokens, each.tokens)
        assert others[number].finish_reason == each.finish_reason
    assert other.counts.tokens_per_step > 1


def test_proposals_do_not_change_the_distribution(tmp_path) -> None:
    """Of the last three tokens: chi-square of 3000 completions without and 3000 with proposals, with other seeds."""
    save_random("mistral", tmp_path, num_hidden_layers=1, vocab_size=5)
    some = [Prompt(number, np.array([0, 1, 2, 3] * 2, np.int32)) for number in range(3000)]
    counts = []
    for num_proposed in (0, 2):
        sampling = Sampling(1.0, top_k=4, top_p=0.95, seed=1 + num_proposed)
        drawn = generator(tmp_path, rows=500, max_prompt=8, max_new_tokens=4, sampling=sampling, speculate=num_proposed)
        last = [each.tokens[-3:] @ [25, 5, 1] for each in completed(drawn, some).values()]
        counts.append(np.bincount(last, minlength=125))
    assert drawn.counts.tokens_per_step > 1.5
    total = np.sum(counts, axis=0)
    freedom = np.count_nonzero(total) - 1
    statistic = np.sum(np.diff(counts, axis=0)[0][total > 0] ** 2 / total[total > 0])
    assert freedom > 40
    assert statistic < freedom + 3 * np.sqrt(2 * freedom)  # of a normal distribution with this mean and deviation


def test_samples_of_a_prompt_differ_and_depend_on_nothing_else(path: Path, drawing: Generator) -> None:
    """With one prefill for all samples of a prompt. The first is the completion without further samples."""
    some, keys = prompts(7), activation_keys((1,), (Site.resid_post,))
    several = generator(path, **DRAWN, samples=3)
    found = completed_samples(several, some)
    assert found.keys() == {(prompt.number, sample) for prompt in some for sample in range(3)}
    assert several.counts.prompts == 7
    other = generator(path, keys, **DRAWN, samples=3, rows=4, segment_steps=5, speculate=2)
    other = completed_samples(other, some[::-1])
    extract, by_number = extraction(path, keys), {prompt.number: prompt for prompt in some}
    for place, each in found.items():
        np.testing.assert_array_equal(other[place].tokens, each.tokens)
        expected = extract(by_number[place[0]], each)[keys[0]]
        np.testing.assert_allclose(other[place].activations[keys[0]], expected, atol=1e-4 * np.abs(expected).max())
    alone = completed(drawing, some)
    for prompt in some:
        np.testing.assert_array_equal(found[prompt.number, 0].tokens, alone[prompt.number].tokens)
        assert len({found[prompt.number, sample].tokens.tobytes() for sample in range(3)}) == 3


def test_a_stop_ends_a_completion_where_it_first_occurs(path: Path, drawing: Generator) -> None:
    """Wherever it lies in a segment, before an end token too, and with the activations of all tokens that are left."""

    def stop_at(tokens: np.ndarray, checked: int = 0) -> int | None:
        found = np.flatnonzero(tokens[checked:] % 10 == 7)
        return checked + int(found[0]) + 1 if found.size else None

    some, keys = prompts(13), activation_keys((1,), (Site.resid_post,))
    stopping = generator(path, keys, **DRAWN, speculate=2)
    stopping.stop_at = stop_at
    whole, found, sizes = completed(drawing, some), completed(stopping, some), set()
    extract = extraction(path, keys)
    for prompt in some:
        each, expected = found[prompt.number], whole[prompt.number].tokens
        stop = stop_at(expected)
        np.testing.assert_array_equal(each.tokens, expected[:stop])
        assert each.finish_reason == ("stop" if stop else whole[prompt.number].finish_reason)
        sizes.add(stop)
        for key, values in each.activations.items():
            extracted = extract(prompt, each)[key]
            np.testing.assert_allclose(values, extracted, atol=1e-4 * np.abs(extracted).max())
    assert len(sizes) > 5
    assert stopping.counts.row_steps < drawing.counts.row_steps


def test_prefills_are_nearly_full(path: Path) -> None:
    """With prompts that fill their slots, and completions of all lengths."""
    rng = np.random.default_rng(0)
    some = [Prompt(k, rng.integers(0, VOCAB_SIZE, MAX_PROMPT, dtype=np.int32)) for k in range(150)]
    compiled = generator(path, **DRAWN, rows=32, segment_steps=4)
    completed(compiled, some)
    counts = compiled.counts
    assert counts.prompt_tokens / counts.prefill_slots > 0.85
    assert counts.padding < 0.35


@pytest.mark.parametrize(
    ("family", "lengths", "options"),
    [
        ("mistral", (1,), {}),
        ("mistral", (20,), {"max_prompt": 60, "speculate": 2}),  # prompts longer than the window's 32 slots
        ("deepseek_v3", (9,), {"speculate": 2}),
        ("qwen3_5_text", (9,), {}),
    ],
)
def test_activations_of_decoding_equal_those_of_extraction(
    family: str, lengths: tuple[int, ...], options: dict, tmp_path
) -> None:
    """For all tokens of prompt and completion, the last included, also in reused rows."""
    save(family, tmp_path)
    keys = activation_keys((1,), (Site.q, Site.v, Site.attn_z, Site.mlp_out, Site.resid_post))
    keys += (*activation_keys((0,), (Site.attn_in, Site.attn_out)), *activation_keys((), (Site.embed, Site.final_norm)))
    some = prompts(6, max_prompt=options.get("max_prompt", MAX_PROMPT))
    by_number = {prompt.number: prompt for prompt in some}
    extract = extraction(tmp_path, keys)
    for num_new in lengths:
        compiled = generator(tmp_path, keys, **DRAWN, rows=2, max_new_tokens=num_new, **options)
        for number, each in completed(compiled, some).items():
            expected = extract(by_number[number], each)
            assert each.activations.keys() == set(keys)
            for key, values in each.activations.items():
                assert values.shape == expected[key].shape
                error = np.abs(values - expected[key]).max() / np.abs(expected[key]).max()
                assert error < 1e-4, (key.name, number)


@pytest.mark.parametrize("family", ["mistral", pytest.param("gemma4_text", marks=pytest.mark.slow), "deepseek_v3"])
def test_an_int8_cache_rounds_keys_and_values_of_generated_tokens(family: str, tmp_path) -> None:
    """Prompt tokens attend to exact values. The tolerance allows for values that are rounded differently."""
    save(family, tmp_path)
    keys = activation_keys((1,), (Site.attn_z, Site.resid_post))
    compiled = generator(tmp_path, keys, max_new_tokens=9, cache_is_int8=True)
    slots = jax.tree.leaves(compiled.programs.empty().caches)
    assert {each.dtype.name for each in slots} == {"int8", "float32"}
    some = prompts(4)
    extract = extraction(tmp_path, keys)
    for number, each in completed(compiled, some).items():
        (prompt,) = (prompt for prompt in some if prompt.number == number)
        expected, exact = extract(prompt, each, prompt.tokens.size), extract(prompt, each)
        for key, values in each.activations.items():
            error, effect = (np.linalg.norm(values - other[key]) for other in (expected, exact))
            assert error < 0.2 * effect, (key.name, number, error, effect)


def test_values_that_are_not_finite_do_not_reach_the_rows_next_document(tmp_path) -> None:
    save_random("llama", tmp_path, num_hidden_layers=2)
    compiled = generator(tmp_path, rows=1, max_new_tokens=8)
    bad, good = np.array([5] * MAX_PROMPT, np.int32), np.array([6, 7], np.int32)
    expected = completed(compiled, [Prompt(1, good)])[1].tokens
    compiled.params["embed"] = compiled.params["embed"].at[5].set(np.nan)
    assert 5 not in expected
    np.testing.assert_array_equal(completed(compiled, [Prompt(0, bad), Prompt(1, good)])[1].tokens, expected)


def test_stop_ends_the_run_before_the_next_prompt(drawing: Generator) -> None:
    assert list(drawing.run(iter(prompts(4)), stop=lambda: True)) == []


def test_encoders_are_refused(tmp_path) -> None:
    save_random("bert", tmp_path)
    with pytest.raises(ConfigError, match="is an encoder"):
        generator(tmp_path)
