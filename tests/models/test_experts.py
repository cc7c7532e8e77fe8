"""Experts: the grouped products of TPUs, which run on a CPU too, against the loop over blocks that others take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.models.architecture import Experts
from pipeline.models.experts import _in_blocks, _in_groups, _route
from pipeline.models.int8_weights import Int8Weight, quantise
from pipeline.models.registry import open_model
from tests.models.hf_reference import save_random

NUM_EXPERTS = 5
SIZES = {
    "even": [8, 8, 8, 8, 8],
    "one expert has all": [0, 0, 40, 0, 0],
    "some have none, one has more than a block": [0, 150, 1, 0, 9],
    "tokens of other devices' experts at the end": [3, 0, 7, 2, 0],
}


@pytest.mark.parametrize("with_int8", [False, True])
@pytest.mark.parametrize("case", SIZES)
def test_groups_equal_blocks_equal_one_expert_at_a_time(case: str, with_int8: bool, tmp_path) -> None:
    save_random("mixtral", tmp_path)
    arch = open_model(str(tmp_path)).arch
    rng = np.random.default_rng(0)
    sizes = np.array(SIZES[case], np.int32)
    x = rng.normal(size=(160 if sizes.sum() == 160 else 40, arch.d_model)).astype(np.float32)
    shapes = {"gate": (arch.d_mlp, arch.d_model), "up": (arch.d_mlp, arch.d_model), "down": (arch.d_model, arch.d_mlp)}
    weights = {name: rng.normal(size=(NUM_EXPERTS, *shape)).astype(np.float32) for name, shape in shapes.items()}
    used = {name: jnp.asarray(weight) for name, weight in weights.items()}
    if with_int8:
        used = {name: Int8Weight(*map(jnp.asarray, quantise(weight, 1))) for name, weight in weights.items()}
        weights = {name: np.asarray(weight.values * weight.scale[..., None]) for name, weight in used.items()}
    expected, first = np.zeros_like(x), 0
    for expert, size in enumerate(sizes):
        gate, up, down = (weights[name][expert] for name in shapes)
        tokens = x[first : first + size]
        expected[first : first + size] = np.asarray(jax.nn.silu(tokens @ gate.T) * (tokens @ up.T)) @ down.T
        first += size
    for compute in (_in_groups, _in_blocks):
        got = jax.jit(compute, static_argnames="arch")(jnp.asarray(x), jnp.asarray(sizes), used, arch)
        np.testing.assert_allclose(got[:first], expected[:first], rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("sums_to_one", [False, True])
def test_of_equal_logits_the_lower_numbers_are_chosen(sums_to_one: bool) -> None:
    logits = jnp.array([[[0.0, 3.0, 1.0, 3.0, 1.0, 1.0], [2.0] * 6]])
    routing = _route(logits, Experts("S", 6, 3, 8, sums_to_one))
    assert routing.indices.tolist() == [[[1, 3, 2], [0, 1, 2]]]
    shares = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = np.take_along_axis(np.asarray(shares), np.asarray(routing.indices), axis=-1)
    if sums_to_one:
        expected /= expected.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(routing.weights, expected, rtol=1e-6)
