"""The kernels of TPUs and GPUs against attention as matrix products.

Splash attention is interpreted on the CPU; `test_compile_check.py` compiles it for TPUs. cuDNN's kernel is lowered, and
runs where there is a GPU.
"""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import AxisType, Mesh

from pipeline.models.attention.cudnn import attend_cudnn
from pipeline.models.attention.spec import AttentionInputs, AttentionSpec
from pipeline.models.attention.splash import attend_blocks, attend_splash, block_size, blocks_to_run, skips_blocks
from pipeline.models.attention.xla import attend_xla
from tests.jobs import run_program
from tests.models.packings import packings

LENGTH = 256
SINKS = jnp.array([-1.0, 0.0, 2.0, 30.0])


def random_inputs(
    num_heads: int, num_kv_heads: int, dtype: str = "float32", head_dim: int = 64, value_dim: int = 64
) -> AttentionInputs:
    """Documents that cross the kernel's blocks of 128, one that fills a row, single tokens, and a row of padding."""
    segments = np.zeros((3, LENGTH), np.int32)
    segments[0, :90], segments[0, 90:200], segments[0, 200:201], segments[1] = 1, 2, 3, 1
    rng = np.random.default_rng(0)
    sizes = (num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, value_dim)
    return AttentionInputs(*(jnp.asarray(rng.normal(size=(3, LENGTH, *size)), dtype) for size in sizes), segments)


def a_mesh(data: int = 1, tensor: int = 1) -> Mesh:
    return jax.make_mesh((data, tensor), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def interpreted(inputs: AttentionInputs, spec: AttentionSpec) -> jax.Array:
    return attend_splash(inputs, spec, mesh=a_mesh(), interpret=True)


WINDOW_AND_CAP = {"causal": True, "window": 150, "softcap": 1.0}
CASES = {
    "causal": ({"causal": True}, random_inputs(4, 2)),
    "full": ({"causal": False}, random_inputs(2, 2)),
    "window of a block": ({"causal": True, "window": 128}, random_inputs(3, 1)),
    "window, cap and sinks": (WINDOW_AND_CAP, random_inputs(4, 2)._replace(sinks=SINKS)),
    "narrow values": ({"causal": True}, random_inputs(4, 4, value_dim=32)),
    "wide values": ({"causal": True}, random_inputs(4, 4, value_dim=96)),
}


@pytest.mark.parametrize("case", CASES)
def test_splash_equals_the_reference(case: str) -> None:
    rule, inputs = CASES[case]
    spec = AttentionSpec(**rule, scale=0.2)
    np.testing.assert_allclose(interpreted(inputs, spec), attend_xla(inputs, spec), atol=1e-5)


def test_bfloat16_is_as_exact_as_the_reference() -> None:
    """Both round to bfloat16 (2^-9 of a value) at different places; before that they differ by less than 1e-3. Large
    scores do not overflow."""
    inputs, spec = random_inputs(4, 2, "bfloat16"), AttentionSpec(**WINDOW_AND_CAP, scale=0.125)
    got = interpreted(inputs, spec)
    assert got.dtype == jnp.bfloat16
    exact = np.asarray(attend_xla(AttentionInputs(*(x.astype(jnp.float32) for x in inputs[:3]), inputs[3]), spec))
    difference = np.abs(np.asarray(got, np.float32) - exact)
    assert (difference <= 1e-3 + 2**-8 * np.abs(exact)).all()
    reference = np.abs(np.asarray(attend_xla(inputs, spec), np.float32) - exact)
    assert difference.mean() <= reference.mean() < 1e-3
    large = interpreted(inputs._replace(q=inputs.q * 200, k=inputs.k * 200), AttentionSpec(causal=True, scale=0.125))
    assert np.isfinite(np.asarray(large, np.float32)).all()


@pytest.mark.parametrize(
    ("length", "item_bytes", "size"),
    [(128, 2, 128), (640, 2, 128), (1152, 2, 384), (4096, 2, 512), (8192, 2, 1024), (8192, 4, 512), (8320, 2, 640)],
)
def test_block_sizes_follow_length_and_dtype(length: int, item_bytes: int, size: int) -> None:
    assert block_size(length, item_bytes) == size


LONG, BLOCK = 512, 128  # rows of 2048 and more would take minutes to interpret


@pytest.mark.parametrize("case", ["causal", "window, cap and sinks"])
def test_skipping_blocks_changes_no_bit(case: str) -> None:
    rule, inputs = CASES[case]
    rng, (num_heads, num_kv_heads) = np.random.default_rng(0), (inputs.q.shape[2], inputs.k.shape[2])
    q, k, v = (
        jnp.asarray(rng.normal(size=(2, LONG, n, 32)), "float32") for n in (num_heads, num_kv_heads, num_kv_heads)
    )
    spec = AttentionSpec(**rule, scale=1)
    attend_all, attend_some = (
        jax.jit(lambda x, skips=skips: attend_blocks(x, spec, BLOCK, skips, interpret=True)) for skips in (False, True)
    )

    @settings(max_examples=8, deadline=None)
    @given(segments=packings(LONG, BLOCK))
    def check(segments: np.ndarray) -> None:
        expected, got = (
            np.asarray(attend(AttentionInputs(q, k, v, segments, inputs.sinks))) for attend in (attend_all, attend_some)
        )
        np.testing.assert_array_equal(got[segments != 0], expected[segments != 0])
        assert np.isfinite(got).all()

    check()


@settings(max_examples=50, deadline=None)
@given(segments=packings(LONG, BLOCK), causal=st.booleans())
def test_blocks_run_where_a_query_attends_to_a_key(segments: np.ndarray, causal: bool) -> None:
    visible = (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] != 0)
    visible |= np.eye(LONG, dtype=bool)
    num_blocks = LONG // BLOCK
    allowed = np.tri(num_blocks, dtype=bool) if causal else np.ones((num_blocks, num_blocks), bool)
    needed = visible.reshape(2, num_blocks, BLOCK, num_blocks, BLOCK).any(axis=(2, 4)) & allowed
    key_blocks = np.broadcast_to(np.arange(num_blocks, dtype=np.int8), allowed.shape)
    runs, fetched = (np.asarray(each) for each in blocks_to_run(jnp.asarray(segments), allowed, key_blocks, BLOCK))
    np.testing.assert_array_equal(runs, needed)
    of_all_rows = key_blocks + np.arange(2)[:, None, None] * num_blocks
    np.testing.assert_array_equal(fetched[runs], of_all_rows[runs])
    assert np.count_nonzero(np.diff(fetched.ravel())) < runs.sum()  # no fetch for a step that does not run


@pytest.mark.parametrize(
    ("num_rows", "length", "skips"),
    [(1, 1920, False), (1, 2048, True), (192, 2048, True), (193, 2048, False), (4, 131072, True), (9, 131072, False)],
)
def test_long_rows_skip_blocks_unless_the_scalar_memory_is_too_small(num_rows: int, length: int, skips: bool) -> None:
    assert skips_blocks(num_rows, length, block_size(length, item_bytes=2)) == skips


FOUR_DEVICES = """
import sys, jax, numpy as np
sys.path.insert(0, {here!r})
from jax.sharding import NamedSharding, PartitionSpec as P
from test_attention_kernels import *
inputs = AttentionInputs(*(np.repeat(np.asarray(x)[:2], 2, axis=0) for x in random_inputs(4, 2)[:4]), np.asarray(SINKS))
spec = AttentionSpec(causal=True, scale=0.125)
expected = attend_xla(inputs, spec)
mesh = a_mesh(2, 2)
heads, rows = NamedSharding(mesh, P("data", None, "tensor")), NamedSharding(mesh, P("data"))
inputs = jax.device_put(inputs, AttentionInputs(heads, heads, heads, rows, NamedSharding(mesh, P("tensor"))))
attend = jax.jit(lambda x: attend_splash(x, spec, mesh=mesh, interpret=True), out_shardings=heads)
compiled = attend.lower(inputs).compile()
np.testing.assert_allclose(compiled(inputs), expected, atol=1e-5)
text = compiled.as_text()
assert not any(name in text for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
"""


def test_rows_and_heads_are_divided_without_communication() -> None:
    """In another process, since the number of devices is fixed when JAX starts."""
    script = FOUR_DEVICES.format(here=str(Path(__file__).resolve().parent))
    done = run_program(script, env=os.environ | {"JAX_NUM_CPU_DEVICES": "4"})
    assert done.returncode == 0, done.stderr


CUDNN_RULES = {"causal": {"causal": True}, "full": {"causal": False}, "window": {"causal": True, "window": 40}}


@pytest.mark.parametrize("value_dim", [64, 48])
@pytest.mark.parametrize("rule", CUDNN_RULES.values(), ids=CUDNN_RULES.keys())
def test_cudnn_lowers_to_one_call_of_the_fused_kernel(rule: dict, value_dim: int, monkeypatch) -> None:
    """JAX asks cuDNN for its version while tracing, and cuDNN need not be installed here. Narrow values are padded."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    attend = jax.jit(lambda x: attend_cudnn(x, AttentionSpec(scale=0.125, **rule)))
    lowered = attend.trace(random_inputs(4, 2, "bfloat16", value_dim=value_dim)).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("__cudnn$fmhaScaleBiasSoftmax") == 1
    mask_type = "CAUSAL" if rule["causal"] else "NO_MASK"
    assert rf"\22mask_type\22: \22{mask_type}\22" in text
    assert "dot_general" not in text
    assert lowered.out_info.shape == (3, LENGTH, 4, value_dim)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("dims", [(64, 64), (192, 128)], ids=str)
@pytest.mark.parametrize("rule", CUDNN_RULES.values(), ids=CUDNN_RULES.keys())
def test_cudnn_equals_the_reference(rule: dict, dims: tuple[int, int]) -> None:
    inputs, spec = random_inputs(4, 2, "bfloat16", *dims), AttentionSpec(scale=0.125, **rule)
    got = np.asarray(jax.jit(lambda x: attend_cudnn(x, spec))(inputs), np.float32)
    exact = attend_xla(AttentionInputs(*(x.astype(jnp.float32) for x in inputs[:3]), inputs.segments), spec)
    np.testing.assert_allclose(got, exact, atol=2e-2)
