"""Splash attention, interpreted on the CPU, against the reference. `test_compile_check.py` compiles it for TPUs."""

import os
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

from pipeline.models.attention.spec import AttentionSpec
from pipeline.models.attention.splash import (
    Steps,
    attend_blocks,
    attend_splash,
    block_size,
    blocks_to_run,
    skips_blocks,
)
from pipeline.models.attention.xla import attend_xla
from tests.jobs import run_program
from tests.models.packings import packings

LENGTH = 256


def packed_rows() -> np.ndarray:
    """Documents that cross the kernel's blocks of 128, one that fills a row, single tokens, and padding."""
    rows = np.zeros((3, LENGTH), np.int32)
    rows[0, :90], rows[0, 90:200], rows[0, 200:201] = 1, 2, 3
    rows[1] = 1
    return rows  # the third row is only padding


def inputs(num_heads: int, num_kv_heads: int, dtype: str, head_dim: int = 64) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    shapes = [(3, LENGTH, heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads)]
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def a_mesh(data: int = 1, tensor: int = 1) -> Mesh:
    return jax.make_mesh((data, tensor), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


RULES = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "window": {"causal": True, "window": 40},
    "window of a block": {"causal": True, "window": 128},
    "capped": {"causal": True, "softcap": 2.0},
    "window and cap": {"causal": True, "window": 150, "softcap": 1.0},
}


@pytest.mark.parametrize(
    ("rule", "num_heads", "num_kv_heads"),
    [
        *(("causal", 4, 2), ("full", 2, 2), ("window", 3, 1)),
        *(("window of a block", 4, 2), ("capped", 4, 2), ("window and cap", 4, 2)),
    ],
)
def test_results_equal_the_reference(rule: str, num_heads: int, num_kv_heads: int) -> None:
    q, k, v = inputs(num_heads, num_kv_heads, "float32")
    segments, spec = jnp.array(packed_rows()), AttentionSpec(**RULES[rule], scale=0.2)
    got = attend_splash(q, k, v, segments, spec, mesh=a_mesh(), interpret=True)
    np.testing.assert_allclose(got, attend_xla(q, k, v, segments, spec), atol=1e-5)


@pytest.mark.parametrize("value_dim", [32, 96])
def test_values_may_have_another_dimension_than_keys(value_dim: int) -> None:
    q, k, _ = inputs(4, 4, "float32")
    v = inputs(4, 4, "float32", value_dim)[2]
    segments, spec = jnp.array(packed_rows()), AttentionSpec(causal=True, scale=0.2)
    got = attend_splash(q, k, v, segments, spec, mesh=a_mesh(), interpret=True)
    assert got.shape[-1] == value_dim
    np.testing.assert_allclose(got, attend_xla(q, k, v, segments, spec), atol=1e-5)


SINKS = jnp.array([-1.0, 0.0, 2.0, 30.0])


def test_results_with_sinks_equal_the_reference() -> None:
    """Causal attention with sinks is tested on four devices."""
    q, k, v = inputs(4, 2, "float32")
    segments, spec = jnp.array(packed_rows()), AttentionSpec(**RULES["window and cap"], scale=0.2)
    got = attend_splash(q, k, v, segments, spec, SINKS, mesh=a_mesh(), interpret=True)
    np.testing.assert_allclose(got, attend_xla(q, k, v, segments, spec, SINKS), atol=1e-5)


@pytest.mark.parametrize("rule", ["full", "window and cap"])
def test_bfloat16_is_as_exact_as_the_reference(rule: str) -> None:
    """Both round to bfloat16 (2^-9 of a value) at different places; before that they differ by less than 1e-3."""
    q, k, v = inputs(4, 2, "bfloat16")
    segments, spec = jnp.array(packed_rows()), AttentionSpec(**RULES[rule], scale=0.125)
    got = attend_splash(q, k, v, segments, spec, mesh=a_mesh(), interpret=True)
    assert got.dtype == jnp.bfloat16
    exact = np.asarray(attend_xla(*(x.astype(jnp.float32) for x in (q, k, v)), segments, spec))
    difference = np.abs(np.asarray(got, np.float32) - exact)
    assert (difference <= 1e-3 + 2**-8 * np.abs(exact)).all()
    reference = np.abs(np.asarray(attend_xla(q, k, v, segments, spec), np.float32) - exact)
    assert difference.mean() <= reference.mean() < 1e-3


def test_large_scores_do_not_overflow() -> None:
    q, k, v = inputs(2, 1, "bfloat16")
    spec = AttentionSpec(causal=True, scale=0.125)
    got = attend_splash(q * 200, k * 200, v, jnp.array(packed_rows()), spec, mesh=a_mesh(), interpret=True)
    assert np.isfinite(np.asarray(got, np.float32)).all()


@pytest.mark.parametrize(
    ("length", "item_bytes", "size"),
    [
        *((128, 2, 128), (256, 2, 256), (384, 2, 384), (640, 2, 128), (1024, 2, 512), (1152, 2, 384), (4096, 2, 512)),
        *((8192, 2, 1024), (8192, 4, 512), (8320, 2, 640), (131072, 2, 1024)),
    ],
)
def test_block_sizes_follow_length_and_dtype(length: int, item_bytes: int, size: int) -> None:
    assert block_size(length, item_bytes) == size


LONG, BLOCK = 512, 128  # rows of 2048 and more would take minutes to interpret
HEADS = {"causal": (4, 2), "capped": (2, 2), "window": (2, 1), "window and cap": (3, 1), "full": (2, 2)}
WITH_SINKS = ("window", "full")


@pytest.mark.parametrize(("rule", "heads"), HEADS.items(), ids=HEADS.keys())
def test_skipping_blocks_changes_no_bit(rule: str, heads: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, LONG, n, 16)), "float32") for n in (heads[0], heads[1], heads[1]))
    sinks = SINKS[1 : 1 + heads[0]] if rule in WITH_SINKS else None
    attend = partial(attend_blocks, spec=AttentionSpec(**RULES[rule], scale=1), sinks=sinks)
    attend_all, attend_some = (jax.jit(partial(attend, steps=Steps(BLOCK, skips, True))) for skips in (False, True))

    @settings(max_examples=10, deadline=None)
    @given(segments=packings(LONG, BLOCK))
    def check(segments: np.ndarray) -> None:
        expected, got = np.asarray(attend_all(q, k, v, segments)), np.asarray(attend_some(q, k, v, segments))
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
from test_attention_splash import AttentionSpec, a_mesh, attend_splash, attend_xla, inputs, packed_rows
segments = np.repeat(packed_rows()[:2], 2, axis=0)
q, k, v = (np.repeat(np.asarray(x)[:2], 2, axis=0) for x in inputs(4, 2, "float32"))
spec = AttentionSpec(causal=True, scale=0.125)
sinks = np.array([-1.0, 0.0, 2.0, 30.0], np.float32)
expected = attend_xla(q, k, v, segments, spec, sinks)
mesh = a_mesh(2, 2)
heads, rows = NamedSharding(mesh, P("data", None, "tensor")), NamedSharding(mesh, P("data"))
arguments = jax.device_put((q, k, v, segments, sinks), (heads, heads, heads, rows, NamedSharding(mesh, P("tensor"))))
attend = jax.jit(lambda *x: attend_splash(*x[:4], spec, x[4], mesh=mesh, interpret=True), out_shardings=heads)
compiled = attend.lower(*arguments).compile()
np.testing.assert_allclose(compiled(*arguments), expected, atol=1e-5)
text = compiled.as_text()
assert not any(name in text for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
"""


def test_rows_and_heads_are_divided_without_communication() -> None:
    """In another process, since the number of devices is fixed when JAX starts."""
    script = FOUR_DEVICES.format(here=str(Path(__file__).resolve().parent))
    done = run_program(script, env=os.environ | {"JAX_NUM_CPU_DEVICES": "4"})
    assert done.returncode == 0, done.stderr
