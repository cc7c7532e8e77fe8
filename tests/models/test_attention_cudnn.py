"""cuDNN's attention. Without a GPU only the lowered program can be seen; with one, its results."""

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


def inputs() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(3, LENGTH, heads, 64)), jnp.bfloat16) for heads in (4, 2, 2))
    segments = np.zeros((3, LENGTH), np.int32)
    segments[0, :90], segments[0, 90:150], segments[1] = 1, 2, 1
    return q, k, v, jnp.array(segments)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_lowers_to_one_call_of_the_fused_kernel(rule: dict, monkeypatch) -> None:
    """JAX asks the installed cuDNN for its version while tracing: here there may be none."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    attend = jax.jit(lambda *x: attend_cudnn(*x, AttentionSpec(scale=0.125, **rule)))
    text = attend.trace(*inputs()).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__cudnn$fmhaScaleBiasSoftmax") == 1
    mask_type = "CAUSAL" if rule["causal"] else "NO_MASK"
    assert rf"\22mask_type\22: \22{mask_type}\22" in text
    assert "dot_general" not in text


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_equals_the_reference(rule: dict) -> None:
    q, k, v, segments = inputs()
    spec = AttentionSpec(scale=0.125, **rule)
    got = np.asarray(jax.jit(lambda *x: attend_cudnn(*x, spec))(q, k, v, segments), np.float32)
    exact = attend_xla(*(x.astype(jnp.float32) for x in (q, k, v)), segments, spec)
    np.testing.assert_allclose(got, exact, atol=2e-2)
