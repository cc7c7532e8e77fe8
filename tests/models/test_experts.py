"""Experts: the products of TPUs (they also run on CPUs) and of GPUs (interpreted), and the loop over blocks of other
devices."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pipeline.models.architecture import Activation, Experts, Router
from pipeline.models.exchange.tokens import Order, by_expert, exchange_tokens
from pipeline.models.experts import _in_blocks, _in_groups, _in_one_kernel, _route, _route_in_groups
from pipeline.models.quantised_weights import QuantisedWeight, grouped_shape, quantise
from pipeline.models.registry import open_model
from tests.models.hf_reference import save_random

pytestmark = pytest.mark.heavy
NUM_EXPERTS = 5
SIZES = {
    "even": [8, 8, 8, 8, 8],
    "one expert has all tokens": [0, 0, 40, 0, 0],
    "some experts have none, one more than a block": [0, 150, 1, 0, 9],
    "tokens of other devices' experts at the end": [3, 0, 7, 2, 0],
}


def mixtral_neurons(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return np.asarray(jax.nn.silu(gate) * up)


def gpt_oss_neurons(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate, up = np.minimum(gate, 5), np.clip(up, -5, 5)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def gelu_neurons(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return np.asarray(jax.nn.gelu(gate, approximate=False) * up)


NEURONS = {
    **{"mixtral": ({}, mixtral_neurons), "gpt_oss": ({"swiglu_limit": 5.0}, gpt_oss_neurons)},
    "qwen3_moe": ({"hidden_act": "gelu"}, gelu_neurons),
}


@pytest.mark.parametrize(
    ("case", "quantised", "family"),
    [
        *((case, None, "gpt_oss") for case in SIZES),
        *(("tokens of other devices' experts at the end", dtype, "mixtral") for dtype in ("int8", "int4")),
        ("even", None, "qwen3_moe"),
    ],
)
def test_sparse_products_equal_one_expert_at_a_time(case: str, quantised: str | None, family: str, tmp_path) -> None:
    overrides, neurons = NEURONS[family]
    save_random(family, tmp_path, **overrides)
    arch = open_model(str(tmp_path)).arch
    rng = np.random.default_rng(0)
    sizes = np.array(SIZES[case], np.int32)
    x = rng.normal(size=(160 if sizes.sum() == 160 else 40, arch.d_model)).astype(np.float32)
    shapes = {"gate": (arch.d_mlp, arch.d_model), "up": (arch.d_mlp, arch.d_model), "down": (arch.d_model, arch.d_mlp)}
    weights = {name: rng.normal(size=(NUM_EXPERTS, *shape)).astype(np.float32) for name, shape in shapes.items()}
    used = {name: jnp.asarray(weight) for name, weight in weights.items()}
    if quantised:
        is_int4 = quantised == "int4"
        shape_of = grouped_shape if is_int4 else tuple
        used = {
            name: QuantisedWeight(*map(jnp.asarray, quantise(w.reshape(shape_of(w.shape)), 1, quantised)), is_int4)
            for name, w in weights.items()
        }
        restored = {name: np.asarray(w.values, np.float32) * w.scale[..., None] for name, w in used.items()}
        weights = {name: np.asarray(restored[name]).reshape(weight.shape) for name, weight in weights.items()}
    biases = {f"{name}_bias": np.zeros(weights[name].shape[:2], np.float32) for name in shapes}
    if family == "gpt_oss":
        biases = {name: rng.normal(size=bias.shape).astype(np.float32) for name, bias in biases.items()}
        used |= {name: jnp.asarray(bias) for name, bias in biases.items()}
    expected, first = np.zeros_like(x), 0
    for expert, size in enumerate(sizes):
        (gate, gate_bias), (up, up_bias), (down, down_bias) = (
            (weights[name][expert], biases[f"{name}_bias"][expert]) for name in shapes
        )
        tokens = x[first : first + size]
        chosen = neurons(tokens @ gate.T + gate_bias, tokens @ up.T + up_bias)
        expected[first : first + size] = chosen @ down.T + down_bias
        first += size
    pairs = rng.permutation(len(x)).astype(np.int32)
    by_expert = Order(pairs, np.argsort(pairs), np.cumsum(sizes))
    for compute in (_in_groups, _in_blocks, partial(_in_one_kernel, interpret=True)):
        got = jax.jit(partial(compute, arch=arch))(x[by_expert.inverse], by_expert, used)
        np.testing.assert_allclose(got[pairs[:first]], expected[:first], rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("on_gpus", [False, True])
@pytest.mark.parametrize("routing", ["uneven", "one expert"])
def test_every_exchanged_pair_comes_back(routing: str, on_gpus: bool, monkeypatch) -> None:
    """In several rounds. 4 devices of 2 experts each; memory that is not written is NaN."""
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan).astype(dtype))
    rng = np.random.default_rng(0)
    experts = np.minimum(rng.geometric(0.4, (4, 160, 3)) - 1, 8) if routing == "uneven" else 5  # 8: none
    experts = np.broadcast_to(experts, (4, 160, 3)).astype(np.int32)
    x = rng.normal(size=(4, 160, 5)).astype(np.float32)

    def compute(x: jax.Array, order: Order) -> jax.Array:
        numbers = jnp.sum(jnp.arange(len(order.order))[:, None] >= order.ends, axis=1)
        factors = jnp.append(1.0 + jnp.arange(2) + 2 * jax.lax.axis_index("x"), jnp.nan)[numbers]
        return (x[order.tokens(slice(None), len(x))] * factors[:, None])[order.inverse]

    def on_device(x: jax.Array, experts: jax.Array) -> jax.Array:
        return exchange_tokens(compute, x, by_expert(experts.ravel(), 8), "x", ("x",), on_gpus)

    got = jax.jit(jax.vmap(on_device, axis_name="x"))(x, experts).reshape(4, 160, 3, 5)
    has_expert = experts[..., None] < 8
    expected = np.where(has_expert, x[:, :, None] * (1 + experts[..., None]), 0).astype(np.float32)
    np.testing.assert_array_equal(np.where(has_expert, got, 0), expected)


@pytest.mark.parametrize("activation", Activation)
def test_experts_lower_to_products_for_a_gpu_that_need_not_be_there(activation: Activation, tmp_path) -> None:
    save_random("mixtral", tmp_path)
    arch = replace(open_model(str(tmp_path)).arch, activation=activation)
    shapes = {"gate": (arch.d_mlp, arch.d_model), "up": (arch.d_mlp, arch.d_model), "down": (arch.d_model, arch.d_mlp)}
    weights = {name: jnp.zeros((NUM_EXPERTS, *shape), jnp.bfloat16) for name, shape in shapes.items()}
    order = Order(jnp.arange(40), jnp.arange(40), 8 * jnp.arange(1, NUM_EXPERTS + 1))
    x = jnp.zeros((40, arch.d_model), jnp.bfloat16)
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        compute = jax.jit(partial(_in_one_kernel, arch=arch))
        text = compute.trace(x, order, weights).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == (3 if activation is Activation.gelu else 2)
    assert not re.search(r"stablehlo\.(dot|while|transpose)", text)


@pytest.mark.parametrize("sums_to_one", [False, True])
def test_among_equal_logits_the_lower_indices_are_chosen(sums_to_one: bool) -> None:
    logits = jnp.array([[[0.0, 3.0, 1.0, 3.0, 1.0, 1.0], [2.0] * 6]])
    routing = _route(logits, experts=Experts("S", 6, 3, 8, sums_to_one))
    assert routing.indices.tolist() == [[[1, 3, 2], [0, 1, 2]]]
    shares = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = np.take_along_axis(np.asarray(shares), np.asarray(routing.indices), axis=-1)
    if sums_to_one:
        expected /= expected.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(routing.weights, expected, rtol=1e-6)


def test_experts_are_chosen_by_logits_that_differ_where_shares_underflow() -> None:
    """In a softmax over all experts, three shares would be 0 and equal."""
    logits = jnp.array([[[0.0, -200.0, -150.0, 300.0]]])
    routing = _route(logits, experts=Experts("S", 4, 3, 8, sums_to_one=True, router=Router.top_softmax))
    assert routing.indices.tolist() == [[[3, 0, 2]]]
    assert routing.weights.tolist() == [[[1, 0, 0]]]
    routing = _route(logits / 100, experts=Experts("S", 4, 3, 8, sums_to_one=True, router=Router.top_softmax))
    shares = np.exp([3, 0, -1.5])
    np.testing.assert_allclose(routing.weights[0, 0], shares / shares.sum(), rtol=1e-6)


V2 = Experts("S", 6, 2, 8, False, Router.groups, num_groups=3, groups_per_token=2, scaling=3.0)
V3 = replace(V2, sums_to_one=True, router=Router.sigmoid_groups)


def test_groups_are_chosen_by_their_largest_share() -> None:
    """The second group has the largest sum, the other groups the largest single shares."""
    logits = jnp.log(jnp.array([[[0.30, 0.01, 0.20, 0.19, 0.05, 0.25], [0.1, 0.3, 0.1, 0.1, 0.3, 0.1], [1 / 6] * 6]]))
    routing = _route_in_groups(logits, experts=V2)
    assert routing.indices.tolist() == [[[0, 5], [1, 4], [0, 1]]]
    np.testing.assert_allclose(routing.weights, [[[0.9, 0.75], [0.9, 0.9], [0.5, 0.5]]], rtol=1e-6)


def test_groups_are_chosen_by_their_two_largest_scores_and_corrections_do_not_weight() -> None:
    scores = np.array([[[0.9, 0.1, 0.6, 0.5, 0.55, 0.5], [0.5] * 6]], np.float32)
    logits = jnp.log(scores / (1 - scores))
    routing = _route_in_groups(logits, jnp.zeros(6), experts=V3)
    assert routing.indices.tolist() == [[[2, 4], [0, 1]]]
    np.testing.assert_allclose(routing.weights, [[[3 * 0.6 / 1.15, 3 * 0.55 / 1.15], [1.5, 1.5]]], rtol=1e-5)
    routing = _route_in_groups(logits, jnp.array([-2.0, 2.5, -3.0, -3.0, -1.0, 0.0]), experts=V3)
    assert routing.indices.tolist() == [[[5, 1], [1, 5]]]  # 1 is chosen first, and has the smaller weight
    np.testing.assert_allclose(routing.weights, [[[2.5, 0.5], [1.5, 1.5]]], rtol=1e-5)
