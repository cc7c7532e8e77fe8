"""cuDNN's attention: the lowered program, and on a GPU also its results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from pipeline.models.attention.cudnn import attend_cudnn
from pipeline.models.attention.spec import AttentionSpec
from pipeline.models.attention.xla import attend_xla

LENGTH = 200
RULES = {"causal": {"causal": True}, "full": {"causal": False}, "window": {"causal": True, "window": 40}}


def inputs(key_dim: int = 64, value_dim: int = 64) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    sizes = (4, key_dim), (2, key_dim), (2, value_dim)
    q, k, v = (jnp.asarray(rng.normal(size=(3, LENGTH, *size)), jnp.bfloat16) for size in sizes)
    segments = np.zeros((3, LENGTH), np.int32)
    segments[0, :90], segments[0, 90:150], segments[1] = 1, 2, 1
    return q, k, v, jnp.array(segments)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_attention_lowers_to_one_call_of_the_fused_kernel(rule: dict, monkeypatch) -> None:
    """JAX asks cuDNN for its version while tracing, and cuDNN need not be installed here."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    attend = jax.jit(lambda *x: attend_cudnn(*x, AttentionSpec(scale=0.125, **rule)))
    text = attend.trace(*inputs()).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__cudnn$fmhaScaleBiasSoftmax") == 1
    mask_type = "CAUSAL" if rule["causal"] else "NO_MASK"
    assert rf"\22mask_type\22: \22{mask_type}\22" in text
    assert "dot_general" not in text


def test_narrower_values_are_padded(monkeypatch) -> None:
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    attend = jax.jit(lambda *x: attend_cudnn(*x, AttentionSpec(causal=True, scale=0.1)))
    lowered = attend.trace(*inputs(96, 64)).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("__cudnn$fmhaScaleBiasSoftmax") == 1
    assert lowered.out_info.shape == (3, LENGTH, 4, 64)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("dims", [(64, 64), (192, 128)], ids=str)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_results_equal_the_reference(rule: dict, dims: tuple[int, int]) -> None:
    q, k, v, segments = inputs(*dims)
    spec = AttentionSpec(scale=0.125, **rule)
    got = np.asarray(jax.jit(lambda *x: attend_cudnn(*x, spec))(q, k, v, segments), np.float32)
    exact = attend_xla(*(x.astype(jnp.float32) for x in (q, k, v)), segments, spec)
    np.testing.assert_allclose(got, exact, atol=2e-2)
