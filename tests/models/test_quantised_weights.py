"""int8 and int4 weights: which leaves are quantised, their error, and the forward pass with them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from test_parity import layers_that_suffice

from pipeline.cluster.sharding import make_mesh
from pipeline.config.schema import CaptureConfig
from pipeline.core.sites import ActivationKey, Site
from pipeline.models import quantised_weights
from pipeline.models.checkpoints import leaf_reading
from pipeline.models.checkpoints.leaf_reading import read_leaf
from pipeline.models.leaves import num_params, quantised_leaves
from pipeline.models.partition import Partition
from pipeline.models.quantised_weights import QuantisedWeight, grouped_shape, quantise
from pipeline.models.registry import Model, open_model
from pipeline.planning.capture import captured_keys
from pipeline.step.compiled_step import compile_step
from tests.models.hf_reference import NUM_LAYERS, save_random
from tests.specs import step_spec

pytestmark = pytest.mark.heavy
DEVICE = SingleDeviceSharding(jax.devices()[0])
FAMILIES = (
    *("bert", "deepseek_v3", "gemma4_text", "gpt2", "gpt_neox"),
    *("gpt_oss", "llama", "mixtral", "phi3", "qwen2_moe"),
)
"""One family for each layout of matrices in files and for each way to multiply by them. The matrices of Gemma 2 and 3,
Mistral, OLMo, Qwen2, Qwen3 and SmolLM3 are LLaMA's."""
LAST = ActivationKey(NUM_LAYERS - 1, Site.resid_post)
MLP = {"gate", "up", "down"}
LATENT = {"q_down", "q_up", "kv_down", "kv_up", "k_rotary"}
MATRICES = (
    {"q", "k", "v", "qkv", "o"}
    | LATENT
    | MLP
    | {"input_gate", "input_out"}
    | {f"experts_{name}" for name in MLP}
    | {f"shared_{name}" for name in MLP}
)


def is_quantised(node: object) -> bool:
    return isinstance(node, QuantisedWeight)


def dequantised(params):
    """The float values of quantised weights."""

    def restore(node):
        if not is_quantised(node):
            return node
        values = np.asarray(node.values).astype(np.float32)  # NumPy, since JAX would compile for every shape
        restored = values * np.expand_dims(node.scale, tuple(range(node.scale.ndim - values.ndim, 0)))
        return restored.reshape(*values.shape[:-2], -1) if node.is_grouped else restored

    return jax.tree.map(restore, params, is_leaf=is_quantised)


def every_key(model: Model) -> tuple[ActivationKey, ...]:
    return captured_keys(CaptureConfig(layers="all", sites=list(map(str, model.sites))), model)


@pytest.mark.parametrize("num_inputs", [1, 2])
def test_quantisation_is_symmetric_per_output_channel(num_inputs: int) -> None:
    weight = np.random.default_rng(0).normal(size=(5, 6, 7)).astype(np.float32)
    weight[2, ..., 0] = 100  # an outlier affects only its channel
    weight[4] = 0
    values, scale = quantise(weight, num_inputs)
    inputs = tuple(range(-num_inputs, 0))
    assert (values.dtype, scale.dtype, scale.shape) == (np.int8, np.float32, weight.shape[:-num_inputs])
    largest = np.abs(values).max(inputs)
    assert (largest[:4] == 127).all()
    assert (largest[4] == 0).all()
    error = np.abs(values * np.expand_dims(scale, inputs) - weight)
    assert (error <= np.expand_dims(scale, inputs) * 0.5001).all()
    on_device = quantise(jnp.asarray(weight), num_inputs)
    np.testing.assert_allclose(on_device[1], scale, rtol=1e-6)
    assert np.abs(on_device[0].astype(np.int32) - values.astype(np.int32)).max() <= 1


@pytest.mark.parametrize(("size", "groups"), [(256, 2), (129, 3), (32, 1), (2880, 24)])
def test_int4_has_a_scale_per_group_of_inputs(size: int, groups: int) -> None:
    weight = np.random.default_rng(0).normal(size=(5, 2, size)).astype(np.float32)
    weight[2, 1, 0] = 100  # an outlier affects only its group
    weight = weight.reshape(grouped_shape(weight.shape))
    values, scale = quantise(weight, 1, "int4")
    assert (values.dtype, values.shape, scale.shape) == (np.int8, (5, 2, groups, size // groups), (5, 2, groups))
    assert (np.abs(values.astype(np.int8)).max(-1) == 7).all()
    error = np.abs(values.astype(np.float32) * scale[..., None] - weight)
    assert (error <= scale[..., None] * 0.5001).all()
    on_device = quantise(jnp.asarray(weight), 1, "int4")
    np.testing.assert_allclose(on_device[1], scale, rtol=1e-6)
    assert np.abs(on_device[0].astype(np.int32) - values.astype(np.int32)).max() <= 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_have_such_a_scale(value: float) -> None:
    weight = np.ones((2, 3), np.float32)
    weight[1, 1] = value
    _, scale = quantise(weight, 1)
    assert np.isfinite(scale).tolist() == [True, False]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A random model of a family. pytest runs all tests of a model before those of the next one."""
    path = tmp_path_factory.mktemp("model")
    save_random(request.param, path, **layers_that_suffice(request.param, {}))
    return open_model(str(path))


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_only_matrices_of_layers_are_quantised(model: Model) -> None:
    last = ActivationKey(model.num_layers - 1, Site.resid_post)
    for keys in ((last,), every_key(model)):  # stacked, and one by one
        exact = jax.tree_util.tree_leaves_with_path(model.load(keys, "float32", DEVICE))
        small = model.load(keys, "float32", DEVICE, quantised="int8")
        loaded = jax.tree_util.tree_leaves_with_path(small, is_leaf=is_quantised)
        for (path, expected), (_, got), restored in zip(
            exact, loaded, jax.tree.leaves(dequantised(small)), strict=True
        ):
            assert is_quantised(got) == (path[-1].key in MATRICES), path
            if is_quantised(got):
                num_inputs = expected.ndim - got.scale.ndim
                bound = np.expand_dims(np.asarray(got.scale), tuple(range(-num_inputs, 0))) * 0.5001
                assert (np.abs(restored - np.asarray(expected)) <= bound).all(), path
            else:
                np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        *((family, "int8") for family in ("deepseek_v3", "gemma4_text", "gpt2", "gpt_oss")),
        ("qwen2_moe", "int4"),
        *(pytest.param(family, "int4", marks=pytest.mark.slow) for family in ("deepseek_v3", "gemma4_text", "gpt_oss")),
    ],
    indirect=["model"],
)
def test_the_forward_pass_equals_one_with_the_rounded_weights(model: Model, dtype: str, monkeypatch) -> None:
    """For every site of every layer."""
    monkeypatch.setattr(quantised_weights, "_GROUP", 8)
    tokens = jnp.array(np.random.default_rng(1).integers(0, 199, (2, 24)), jnp.int32)
    rest = jnp.ones_like(tokens), jnp.tile(jnp.arange(24, dtype=jnp.int32), (2, 1))
    apply = jax.jit(model.apply, static_argnames="keys")
    keys = every_key(model)
    params = model.load(keys, "float32", DEVICE, quantised=dtype)
    got = apply(params, tokens, *rest, keys=keys)
    for key, expected in apply(dequantised(params), tokens, *rest, keys=keys).items():
        largest = np.abs(expected).max()
        bound = 2e-5 if key.site is Site.head_out else 1e-5  # its sums have as many terms as one head has features
        np.testing.assert_allclose(got[key], expected, rtol=0, atol=bound * largest, err_msg=key.name)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *[("llama", "attention.q"), ("llama", "attention.o"), ("gpt2", "attention.qkv"), ("gpt2", "attention.o")],
        *[("mixtral", "mlp.experts_down"), ("gpt_oss", "mlp.experts_up"), ("phi3", "mlp.up")],
        ("deepseek_v3", "attention.k_rotary"),
    ],
)
@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_part_has_the_scales_of_whole_channels(
    family: str, name: str, dtype: str, piece_bytes: int, tmp_path, monkeypatch
) -> None:
    """A process reads such parts if weights are divided among devices, along any axis and in pieces of any size."""
    monkeypatch.setattr(quantised_weights, "_GROUP", 2)
    monkeypatch.setattr(leaf_reading, "_PIECE_BYTES", piece_bytes)
    save_random(family, tmp_path)
    model = open_model(str(tmp_path))
    block, _, weight = name.partition(".")
    leaf = model.leaves((LAST,))["runs"][0][block][weight]
    whole = (slice(None),) * len(leaf.shape)
    ((exact,),) = read_leaf(model.checkpoint, leaf, np.dtype(np.float32), [whole])
    small = quantised_leaves(leaf, dtype)
    values, scale = quantise(exact.reshape(small.shape), small.inputs_per_scale, dtype)
    inside_groups = (slice(None),) * (len(small.shape) - len(leaf.shape))  # which are not divided
    for axis in range(len(leaf.shape)):
        part = tuple(slice(1, 3) if i == axis else slice(None) for i in range(len(leaf.shape)))
        ((got,),) = read_leaf(model.checkpoint, leaf, np.dtype(np.float32), [part])
        np.testing.assert_array_equal(got, exact[part])
        (got_values,), (got_scale,) = read_leaf(
            model.checkpoint, small, small.dtype("float32"), [(*part, *inside_groups)]
        )
        np.testing.assert_array_equal(got_values.astype(np.int8), values[part].astype(np.int8))
        np.testing.assert_array_equal(got_scale, scale[part[: scale.ndim]])


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_random_weights_are_rounded_like_a_checkpoint(dtype: str, tmp_path) -> None:
    save_random("qwen2", tmp_path)
    model = open_model(str(tmp_path), init="random")
    exact = model.load((LAST,), "float32", DEVICE)["runs"][0]["mlp"]
    small = model.load((LAST,), "float32", DEVICE, quantised=dtype)["runs"][0]["mlp"]
    values, scale = quantise(np.asarray(exact["down"]).reshape(small["down"].values.shape), 1, dtype)
    assert np.abs(small["down"].values.astype(np.int32) - values.astype(np.int32)).max() <= 1  # ties, when fused
    np.testing.assert_allclose(small["down"].scale, scale, rtol=1e-6)
    np.testing.assert_array_equal(small["norm"], exact["norm"])


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_weights_are_quantised_until_their_product(dtype: str, tmp_path) -> None:
    """The step's temporary memory is too small for the float weights of all layers. On CPUs, int4 takes a byte."""
    config = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 32}
    config |= {"num_attention_heads": 2, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, partition = open_model(str(tmp_path), init="random"), Partition(make_mesh())
    keys = (ActivationKey(31, Site.resid_post),)
    params = model.load(keys, "bfloat16", partition.leaf_sharding, quantised=dtype)
    step = compile_step(model, step_spec(model, keys, rows=8, length=16, dtype="bfloat16"), params, partition)
    num_weights = num_params(params["runs"])
    assert step.executable.memory_analysis().temp_size_in_bytes < num_weights / 4
