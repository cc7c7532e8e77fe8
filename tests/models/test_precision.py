"""float32 products stay float32, and factors are not rounded, in models of any dtype.

Accelerators round the operands of float32 products that do not ask for more. A CPU does not, so the tests read the
programs that are lowered for TPUs."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_parity import FAMILIES

from pipeline.core.sites import activation_keys
from pipeline.models.attention.arithmetic import scaled
from pipeline.models.attention.spec import AttentionInputs, AttentionSpec
from pipeline.models.attention.splash import attend_splash
from pipeline.models.attention.xla import attend_xla
from pipeline.models.head import Head
from pipeline.models.recurrent.delta_net import DECAY_RULE, DELTA_RULE
from pipeline.models.recurrent.recur import Heads
from pipeline.models.registry import open_model
from pipeline.models.sae.encoding import encode
from pipeline.models.token_outputs import token_outputs
from pipeline.models.weight_specs import has_site
from pipeline.step.compiler import matmul_precision
from tests.models.hf_reference import tiny_config
from tests.models.test_attention_kernels import a_mesh
from tests.models.test_sae_encoding import CASES, sae_arrays

PRODUCT = re.compile(r"= \S*(?:dot_general|ragged_dot|convolution)\b.* : \((.*)\) ->")


def rounded_products(compute, dtype: str, *inputs: object) -> list[str]:
    """The products of float32 arrays in the program for TPUs that do not ask for float32's precision."""
    with jax.default_matmul_precision(matmul_precision(dtype)):
        text = jax.jit(compute).trace(*inputs).lower(lowering_platforms=("tpu",)).as_text()
    products = [(line.strip(), match[1]) for line in text.splitlines() if (match := PRODUCT.search(line))]
    assert products
    return [line for line, operands in products if "xf32>" in operands and line.count("HIGHEST") < 2]


@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", "gemma4_text", "gpt_oss", "lfm2", "nemotron_h", "qwen3_next"],
)
def test_every_float32_product_of_a_family_has_float32s_precision(family: str, tmp_path) -> None:
    tiny_config(family, **FAMILIES[family]).save_pretrained(tmp_path)
    model = open_model(str(tmp_path), init="random")
    keys = activation_keys(tuple(range(model.num_layers)), model.sites)
    keys = tuple(key for key in keys if not key.site.per_layer or has_site(model.arch, key.layer, key.site))
    rows = (jax.ShapeDtypeStruct((2, 160), "int32"),) * 3
    for dtype in ("bfloat16", "float32"):
        params = jax.tree.map(
            lambda leaf, dtype=dtype: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype(dtype)), model.leaves(keys)
        )
        assert rounded_products(partial(model.apply, keys=keys), dtype, params, *rows) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_float32_product_beside_the_layers_has_float32s_precision(dtype: str) -> None:
    x, weight = jnp.ones((2, 3, 8), dtype), jnp.ones((40, 8), dtype)
    outputs = partial(token_outputs, Head("lm_head.weight", softcap=None), num_top=2)
    assert rounded_products(lambda x, w: outputs({"head": w}, x, jnp.zeros((2, 3), int)), dtype, x, weight) == []
    heads = Heads(*(jnp.ones((2, 1, 2, *shape)) for shape in ((4,), (4,), (3, 4), (3,), (3,))))
    for rule in (DELTA_RULE, DECAY_RULE):
        assert rounded_products(rule.step, dtype, jnp.ones((2, 2, 3, 4, 4)), heads) == []
    for sae in CASES.values():
        arrays = sae_arrays(sae, np.random.default_rng(0))
        params = {name: jnp.asarray(array, dtype if array.ndim == 2 else "float32") for name, array in arrays.items()}
        x = jnp.ones((2, 3, sae.d_in), dtype)
        assert rounded_products(lambda x, p, sae=sae: encode(sae, p, x, 3, decodes=True), dtype, x, params) == []


@pytest.mark.parametrize("factor", [96**-0.5, 144**-0.5, 2**-0.5, 1.702, 0.0721 * 1.2079])
def test_a_factor_is_not_rounded(factor: float) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=50_000), jnp.bfloat16)
    got, exact = np.asarray(scaled(x, factor), np.float64), np.asarray(x, np.float64)
    assert abs(got @ exact / (exact @ exact) / factor - 1) < 1e-4


ATTEND = {
    "splash": partial(attend_splash, mesh=a_mesh(), interpret=True),
    "xla": attend_xla,
}


@pytest.mark.parametrize(("name", "head_dim"), [("splash", 80), ("splash", 192), ("xla", 96)])
def test_logits_have_no_systematic_error(name: str, head_dim: int) -> None:
    """With one token per value dim, z is the attention pattern, whose logarithm has the logits' differences."""
    length, scale = 256, head_dim**-0.5
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, length, 2, head_dim)), jnp.bfloat16) for _ in range(2))
    v = jnp.tile(jnp.eye(length, dtype=jnp.bfloat16)[None, :, None], (1, 1, 2, 1))
    spec = AttentionSpec(causal=False, scale=scale)
    z = np.asarray(ATTEND[name](AttentionInputs(q, k, v, jnp.ones((1, length), jnp.int32)), spec), np.float64)
    exact = np.einsum("btnh,bsnh->btns", *(np.asarray(x, np.float64) for x in (q, k))) * scale
    got = np.log(np.maximum(z, 1e-9))
    got, exact = (values - values.mean(axis=-1, keepdims=True) for values in (got, exact))
    assert abs((got * exact).sum() / np.square(exact).sum() - 1) < 3e-4
