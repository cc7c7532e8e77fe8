"""The error of bfloat16 against float32, for single operations and at every site of whole models.

The weights are rounded first, so both dtypes use the same weights and only the rounding of activations differs.
"""

import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_parity import GEMMA, GEMMA4, GPT_OSS

from pipeline.config.composing import PACKAGE
from pipeline.core.sites import ActivationKey, Site, activation_keys
from pipeline.models.architecture import Norm
from pipeline.models.attention.spec import AttentionInputs, AttentionSpec
from pipeline.models.attention.xla import attend_xla
from pipeline.models.layers import norm
from pipeline.models.registry import Model, open_model
from pipeline.models.weight_specs import has_site
from tests.models.hf_reference import save_random

pytestmark = pytest.mark.heavy
ONE_ROUNDING = 1.2 * 0.00166  # relative error (RMS) of rounding to 8 bits: the measured one and a fifth more
TWO_ROUNDINGS = 2**0.5 * ONE_ROUNDING
DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def relative_error(got: jax.Array, expected: jax.Array) -> float:
    got, expected = (np.asarray(values, np.float32) for values in (got, expected))
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def error_of(function, *inputs: jax.Array) -> float:
    """The relative error of a function in bfloat16, against float32 for the same inputs."""
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(function)(*(values.astype(jnp.float32) for values in inputs))
    return relative_error(jax.jit(function)(*inputs), expected)


def normal(seed: int, shape: tuple[int, ...], mean: float = 0.0, std: float = 1.0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(mean, std, shape), jnp.bfloat16)


@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}, {"window": 50}], ids=str)
def test_attention_rounds_only_its_weights_and_its_output(options: dict) -> None:
    """Scores reach 50. Rounding them before or in the softmax would at least triple the error."""
    q, k, v = normal(0, (2, 300, 4, 64), std=2), normal(1, (2, 300, 2, 64), std=2), normal(2, (2, 300, 2, 64))
    segments = jnp.ones((2, 300), jnp.int32)
    spec = AttentionSpec(causal=True, scale=0.125, **options)
    error = error_of(lambda q, k, v: attend_xla(AttentionInputs(q, k, v, segments), spec), q, k, v)
    assert error < TWO_ROUNDINGS


@pytest.mark.parametrize("kind", Norm)
def test_norms_round_only_their_output(kind: Norm) -> None:
    arch = dataclasses.replace(open_model(str(PACKAGE / "assets" / "tiny-qwen2")).arch, norm=kind)
    x, scale, bias = normal(0, (2, 300, 512), mean=3), normal(1, (512,), mean=1, std=0.25), normal(2, (512,), std=0.25)

    def normed(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        return norm(x, {"norm": scale, "norm_bias": bias}, "norm", arch)

    assert error_of(normed, x, scale, bias) < (TWO_ROUNDINGS if kind is Norm.rms else ONE_ROUNDING)


BOUNDS = {
    "bundled": 0.0105,
    "bert": 0.0070,
    "gemma2": 0.0200,
    "qwen3_5_text": 0.0330,
}
"""Bounds for the residual stream: 1.5 times the measured error. The bundled model is a Qwen2.
LLaMA, Mistral, Phi-3 and SmolLM3 compute a part of what it computes, GPT-NeoX what it and BERT compute, OLMo 2 and 3
and Gemma 3 what Gemma 2 computes with norms of queries and keys, and with windows, which only mask."""
ROUTED = {
    "gemma4_text": (0.91, 0.034),
    "gpt_oss": (0.93, 0.078),
}
"""Models with experts: bounds for the share of tokens with the same experts in all layers, and for their error."""

OVERRIDES = {
    "gemma2": GEMMA,
    "gemma4_text": GEMMA4,
    "gpt_oss": GPT_OSS | {"num_hidden_layers": 2},
}


def save_rounded(name: str, path: Path) -> None:
    if name == "bundled":
        shutil.copytree(PACKAGE / "assets" / "tiny-qwen2", path, dirs_exist_ok=True)
    else:
        save_random(name, path, **OVERRIDES.get(name, {}))
    file = path / "model.safetensors"
    save_file({key: value.astype(ml_dtypes.bfloat16) for key, value in load_file(file).items()}, file)


def captured_in_both(model: Model, keys: tuple[ActivationKey, ...]) -> list[dict[ActivationKey, jax.Array]]:
    """The activations in bfloat16 and in float32."""
    tokens = jnp.array(np.random.default_rng(5).integers(0, model.vocab_size, (4, 96)), jnp.int32)
    positions = jnp.tile(jnp.arange(96, dtype=jnp.int32), (4, 1))
    apply = jax.jit(model.apply, static_argnames="keys")
    return [
        apply(model.load(keys, dtype, DEVICE), tokens, jnp.ones_like(tokens), positions, keys=keys)
        for dtype in ("bfloat16", "float32")
    ]


@pytest.mark.parametrize("name", BOUNDS)
def test_the_error_of_every_site_is_bounded(name: str, tmp_path) -> None:
    """In the first and the last layer: layers between are as one of them, and their errors reach the last. `pytest -s`
    shows a table of the errors."""
    save_rounded(name, tmp_path)
    model = open_model(str(tmp_path))
    keys = activation_keys((0, model.num_layers - 1), model.sites)
    keys = tuple(key for key in keys if not key.site.per_layer or has_site(model.arch, key.layer, key.site))
    captured = captured_in_both(model, keys)
    errors = {key: relative_error(*(each[key] for each in captured)) for key in keys}
    for site in model.sites:
        figures = " ".join(f"{1e3 * error:6.2f}" for key, error in errors.items() if key.site is site)
        print(f"{name:12}{site:11} thousandths, layer by layer: {figures}")
    assert max(error for key, error in errors.items() if key.site is Site.resid_post) < BOUNDS[name]
    assert max(errors.values()) < 2 * BOUNDS[name]


@pytest.mark.parametrize("name", ROUTED)
def test_few_tokens_get_other_experts_and_the_others_are_exact(name: str, tmp_path) -> None:
    """Rounding can swap nearly equal scores, and a token with another expert has other activations."""
    save_rounded(name, tmp_path)
    model = open_model(str(tmp_path))
    keys = activation_keys(tuple(range(model.num_layers)), (Site.resid_post, Site.router_indices))
    keys = tuple(key for key in keys if has_site(model.arch, key.layer, key.site))
    captured = captured_in_both(model, keys)
    chosen = [[np.sort(each[key]) for each in captured] for key in keys if key.site is Site.router_indices]
    same = np.all([(one == other).all(-1) for one, other in chosen], axis=0)
    error = relative_error(*(each[ActivationKey(model.num_layers - 1, Site.resid_post)][same] for each in captured))
    print(f"{name:12} {same.mean():.3f} have the same experts; error of these {1e3 * error:.1f} thousandths")
    share, bound = ROUTED[name]
    assert same.mean() > share
    assert error < bound
