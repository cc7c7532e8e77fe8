"""`capture.outputs`: the head's predictions for packed documents equal those of transformers for single documents."""

import json

import jax
import numpy as np
import pytest

from pipeline.cluster.sharding import make_mesh, replicated, row_sharding
from pipeline.core.sites import FINAL_NORM, ActivationKey, Site
from pipeline.models import token_outputs
from pipeline.models.head import Head
from pipeline.models.partition import Partition
from pipeline.models.registry import Model, open_model
from pipeline.step.compiled_step import CompiledStep, StepOutputs, compile_step
from pipeline.store.format.layout import OUTPUTS, SELECTED, TOKENS, output_specs
from tests.models.hf_reference import VOCAB_SIZE, save_random, torch
from tests.specs import step_spec

pytestmark = pytest.mark.heavy
KEYS = (ActivationKey(1, Site.resid_post),)
NUM_TOP = 8
# Row, first position, length: rows 0 and 1 are packed, rows 2 and 3 padded.
DOCUMENTS = [(0, 0, 9), (0, 9, 15), (1, 0, 1), (1, 1, 20), (2, 0, 24), (3, 0, 11)]
CASES = {
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    "tied, with a bias": ("gptj", {"n_layer": 2, "tie_word_embeddings": True}),
    "untied, scaled logits": ("granite", {"logits_scaling": 3.0}),
    "untied, capped logits": (
        "gemma2",
        {"head_dim": 6, "sliding_window": 7, "final_logit_softcapping": 4.0, "tie_word_embeddings": False},
    ),
}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary of 199 makes three chunks and a remainder, the 96 slots three tiles, the last one short."""
    monkeypatch.setattr(token_outputs, "CHUNK", 64)
    monkeypatch.setattr(token_outputs, "TILE", 40)


def packed() -> dict[str, np.ndarray]:
    tokens, segments, positions = np.zeros((3, 4, 24), np.int32)
    for row, first, length in DOCUMENTS:
        place = (row, slice(first, first + length))
        tokens[place] = np.random.default_rng(length).integers(0, VOCAB_SIZE, length)
        segments[place] = segments[row].max() + 1
        positions[place] = np.arange(length)
    return {"tokens": tokens, "segments": segments, "positions": positions}


def compiled(model: Model, outputs=tuple(OUTPUTS), **spec: object) -> tuple[CompiledStep, object]:
    mesh = make_mesh()
    slots = SELECTED.slots if "selected" in spec else TOKENS.slots
    spec = step_spec(
        model, KEYS, rows=4, length=24, dtype="float32", head_outputs=output_specs(outputs, NUM_TOP, slots), **spec
    )
    params = model.load(spec.forward_keys, "float32", replicated(mesh), with_head=True)
    return compile_step(model, spec, params, Partition(mesh)), params


def run(step: CompiledStep, params: object, inputs: dict[str, np.ndarray]) -> tuple[StepOutputs, dict[str, np.ndarray]]:
    outputs = step(params, *(jax.device_put(array, row_sharding(step.mesh)) for array in inputs.values()))
    names = [spec.name for spec in step.spec.stored_arrays.outputs]
    return outputs, dict(zip(names, map(np.asarray, outputs.arrays[-len(names) :]), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_outputs_of_packed_and_padded_documents_equal_transformers(case: str, tmp_path, small_chunks) -> None:
    family, overrides = CASES[case]
    reference = save_random(family, tmp_path, **overrides)
    inputs = packed()
    outputs, got = run(*compiled(open_model(str(tmp_path))), inputs)
    for row, first, length in DOCUMENTS:
        place = (row, slice(first, first + length))
        tokens = torch.from_numpy(inputs["tokens"][place].astype(np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(reference(tokens[None]).logits[0].double(), -1)
        top = logprobs.topk(NUM_TOP)
        np.testing.assert_allclose(
            got["loss"][place][:-1], -logprobs[:-1].gather(1, tokens[1:, None])[:, 0], atol=1e-4, rtol=0
        )
        assert np.isnan(got["loss"][place][-1])  # the row's next document is not used
        np.testing.assert_allclose(got["entropy"][place], -(logprobs.exp() * logprobs).sum(-1), atol=1e-4, rtol=0)
        np.testing.assert_allclose(got["top_logprobs"][place], top.values, atol=1e-4, rtol=0)
        np.testing.assert_array_equal(got["top_ids"][place], top.indices)
    padding = inputs["segments"] == 0
    assert all(not values[padding].any() for values in got.values())
    assert np.asarray(outputs.counts).tolist() == [80, 0, 0, 0, 0]  # no loss is missing where there is a next token


def test_a_tied_head_needs_no_weights_but_the_embedding(tmp_path) -> None:
    for name, tied in (("tied", True), ("untied", False)):
        save_random("qwen2", tmp_path / name, tie_word_embeddings=tied)
    tied, untied = (open_model(str(tmp_path / name)) for name in ("tied", "untied"))
    keys = (*KEYS, FINAL_NORM)
    assert tied.weight_bytes(keys, "float32", with_head=True) == tied.weight_bytes(keys, "float32")
    without, with_head = (untied.weight_bytes(keys, "float32", with_head=head).on_device() for head in (False, True))
    assert with_head - without == VOCAB_SIZE * 32 * 4
    flops = [untied.flops_per_token(keys, 24, head_share=share) for share in (0.0, 0.5)]
    assert flops[1] - flops[0] == VOCAB_SIZE * 32


def test_selected_tokens_and_values_that_are_not_finite(tmp_path, small_chunks) -> None:
    save_random("qwen2", tmp_path)
    model, inputs = open_model(str(tmp_path)), packed()
    step, params = compiled(model)
    _, of_all = run(step, params, inputs)
    damaged, got = run(step, params | {"head": params["head"].at[7].set(np.nan)}, inputs)
    assert np.asarray(damaged.counts).tolist() == [80, 0, 80 - len(DOCUMENTS), 80, 80]
    assert np.isnan(got["entropy"]).sum() == 80
    selected = np.array([[2, 8, 9, 23], [0, 20, -1, -1], [5, 23, -1, -1], [-1] * 4], np.int32)
    step, params = compiled(model, ("loss", "top_logprobs"), selected=4)
    _, got = run(step, params, inputs | {"selected": selected})
    assert list(got) == ["loss", "top_logprobs", "top_ids"]
    for name, values in got.items():
        rows = np.arange(4)[:, None]
        np.testing.assert_allclose(values[selected >= 0], of_all[name][rows, selected][selected >= 0], atol=1e-5)
        assert not values[selected < 0].any()
    assert np.isnan(got["loss"]).sum() == 5


def test_a_head_that_is_certain_of_every_next_token_has_zeros(tmp_path, small_chunks) -> None:
    save_random("qwen2", tmp_path)
    step, params = compiled(open_model(str(tmp_path)))
    inputs = packed()
    _, got = run(step, params | {"head": params["head"] * 1e6}, inputs)
    np.testing.assert_array_equal(got["entropy"], 0)
    np.testing.assert_array_equal(got["top_logprobs"][..., 0], 0)
    assert (got["top_logprobs"][..., 1][inputs["segments"] > 0] < -1).all()


@pytest.mark.parametrize("size", [30, 200])
def test_computing_in_chunks_gives_the_outputs_of_the_whole_vocabulary(size: int, small_chunks) -> None:
    """The vocabulary is less than a chunk, or several and a remainder. Equally likely tokens are ordered by id."""
    rng = np.random.default_rng(0)
    x, weight = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((2, 30, 8), (size, 8)))  # exact products
    next_tokens = rng.integers(0, size, (2, 30)).astype(np.int32)
    logits = x.astype(np.float64) @ weight.T.astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    compute = jax.jit(token_outputs.token_outputs, static_argnums=(0, 4))
    got = compute(Head("lm_head.weight", softcap=None), {"head": weight}, x, next_tokens, NUM_TOP)
    np.testing.assert_allclose(got.loss, -np.take_along_axis(logprobs, next_tokens[..., None], -1)[..., 0], atol=1e-5)
    np.testing.assert_allclose(got.entropy, -(np.exp(logprobs) * logprobs).sum(-1), atol=1e-5)
    np.testing.assert_array_equal(got.top_ids, np.argsort(-logprobs, axis=-1, kind="stable")[..., :NUM_TOP])
    without_top = compute(Head("lm_head.weight", softcap=None), {"head": weight}, x, next_tokens, 0)
    np.testing.assert_array_equal(without_top.loss, got.loss)


def test_memory_does_not_grow_with_the_vocabulary(tmp_path) -> None:
    """A step of 4,096 tokens in bfloat16, whose logits would take 2.3 GiB. Measured: 68.3 MiB of temporary memory, all
    but 5 MiB for two arrays (chunk x tile)."""
    config = {
        **{"model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
        **{"num_hidden_layers": 1, "num_key_value_heads": 2, "vocab_size": 151_936},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, mesh = open_model(str(tmp_path), init="random"), make_mesh()
    outputs, keys = output_specs(OUTPUTS, NUM_TOP, TOKENS.slots), (ActivationKey(0, Site.resid_post),)
    spec = step_spec(model, keys, rows=16, length=256, dtype="bfloat16", head_outputs=outputs)
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "bfloat16", sharding=replicated(mesh)),
        model.leaves(spec.forward_keys, with_head=True),
    )
    step = compile_step(model, spec, params, Partition(mesh))
    assert step.executable.memory_analysis().temp_size_in_bytes < 72 << 20
