"""Splash attention, interpreted on the CPU, against the reference. Compiled for a TPU in `test_compile_check.py`."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from pipeline.models.attention.spec import AttentionSpec
from pipeline.models.attention.splash import attend_splash, block_size
from pipeline.models.attention.xla import attend_xla

LENGTH = 256


def packed_rows() -> np.ndarray:
    """Documents that cross the kernel's blocks of 128, one that fills a row, single tokens, and padding."""
    rows = np.zeros((3, LENGTH), np.int32)
    rows[0, :90], rows[0, 90:200], rows[0, 200:201] = 1, 2, 3
    rows[1] = 1
    return rows  # the third row is padding alone


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
    ("num_heads", "num_kv_heads", "rule"),
    [*((4, 2, rule) for rule in RULES.values()), (2, 2, RULES["causal"]), (3, 1, RULES["causal"])],
)
def test_equals_the_reference(num_heads: int, num_kv_heads: int, rule: dict) -> None:
    q, k, v = inputs(num_heads, num_kv_heads, "float32")
    segments, spec = jnp.array(packed_rows()), AttentionSpec(**rule, scale=0.2)
    got = attend_splash(q, k, v, segments, spec, mesh=a_mesh(), interpret=True)
    np.testing.assert_allclose(got, attend_xla(q, k, v, segments, spec), atol=1e-5)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_bfloat16(rule: dict) -> None:
    """Both round to bfloat16, 2^-9 of a value, at different places; before that they agree to less than 1e-3."""
    q, k, v = inputs(4, 2, "bfloat16")
    segments, spec = jnp.array(packed_rows()), AttentionSpec(**rule, scale=0.125)
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
    ("length", "size"), [(128, 128), (256, 256), (384, 384), (640, 128), (1024, 512), (1152, 384), (8192, 512)]
)
def test_block_sizes(length: int, size: int) -> None:
    assert block_size(length) == size


FOUR_DEVICES = """
import sys, jax, numpy as np
sys.path.insert(0, {here!r})
from jax.sharding import NamedSharding, PartitionSpec as P
from test_attention_splash import AttentionSpec, a_mesh, attend_splash, attend_xla, inputs, packed_rows
segments = np.repeat(packed_rows()[:2], 2, axis=0)
q, k, v = (np.repeat(np.asarray(x)[:2], 2, axis=0) for x in inputs(4, 2, "float32"))
spec = AttentionSpec(causal=True, scale=0.125)
expected = attend_xla(q, k, v, segments, spec)
mesh = a_mesh(2, 2)
heads, rows = NamedSharding(mesh, P("data", None, "tensor")), NamedSharding(mesh, P("data"))
attend = jax.jit(lambda *x: attend_splash(*x, spec, mesh=mesh, interpret=True), out_shardings=heads)
compiled = attend.lower(*jax.device_put((q, k, v, segments), (heads, heads, heads, rows))).compile()
got = compiled(*jax.device_put((q, k, v, segments), (heads, heads, heads, rows)))
np.testing.assert_allclose(got, expected, atol=1e-5)
text = compiled.as_text()
assert not any(name in text for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
"""


def test_rows_and_heads_are_divided_without_communication() -> None:
    """In a process of its own: the number of devices is fixed when JAX starts."""
    here = Path(__file__).resolve().parent
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(here.parents[1])}
    script = FOUR_DEVICES.format(here=str(here))
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
