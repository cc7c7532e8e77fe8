"""The kernels of TPUs and GPUs against attention as matrix products.

They are interpreted on the CPU. `test_compile_check.py` compiles splash attention for TPUs; the kernel for GPUs is
lowered, and runs where there is a GPU.
"""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from pipeline.models.attention.flash import attend_flash, key_ranges
from pipeline.models.attention.spec import AttentionInputs, AttentionSpec
from pipeline.models.attention.splash import (
    attend_blocks,
    attend_chunk,
    attend_splash,
    block_size,
    blocks_to_run,
    skips_blocks,
)
from pipeline.models.attention.xla import attend_xla
from tests.jobs import run_program
from tests.models.packings import packings

LENGTH = 256
SINKS = jnp.array([-1.0, 0.0, 2.0, 30.0])


def random_inputs(
    num_heads: int,
    num_kv_heads: int,
    dtype: str = "float32",
    head_dim: int = 64,
    value_dim: int = 64,
    length: int = LENGTH,
) -> AttentionInputs:
    """Documents that cross the kernel's blocks of 128, one that fills a row, single tokens, and a row of padding."""
    segments = np.zeros((3, length), np.int32)
    segments[0, :90], segments[0, 90 : length - 56], segments[0, length - 56], segments[1] = 1, 2, 3, 1
    rng = np.random.default_rng(0)
    sizes = (num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, value_dim)
    return AttentionInputs(*(jnp.asarray(rng.normal(size=(3, length, *size)), dtype) for size in sizes), segments)


def reference(inputs: AttentionInputs, spec: AttentionSpec) -> jax.Array:
    return jax.jit(lambda x: attend_xla(x, spec))(inputs)


def assert_equal_to(expected: jax.Array, got: jax.Array, segments: np.ndarray, atol: float = 1e-5) -> None:
    """Equal except at padding, where all values are finite."""
    expected, got, valid = np.asarray(expected), np.asarray(got), np.asarray(segments) != 0
    np.testing.assert_allclose(got[valid], expected[valid], atol=atol)
    assert np.isfinite(got).all()


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
    "wide values": ({"causal": True}, random_inputs(4, 4, value_dim=96)),
    "rows of 200": ({"causal": False}, random_inputs(2, 2, length=200)),
}


@pytest.mark.parametrize("case", CASES)
def test_splash_equals_the_reference(case: str) -> None:
    rule, inputs = CASES[case]
    spec = AttentionSpec(**rule, scale=0.2)
    assert_equal_to(reference(inputs, spec), interpreted(inputs, spec), inputs.segments)


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


def test_skipping_blocks_changes_no_bit() -> None:
    rule, inputs = CASES["window, cap and sinks"]
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


@pytest.mark.parametrize(
    ("case", "offset"),
    [("full", 0), ("window, cap and sinks", 128)],
)
def test_queries_at_an_offset_attend_as_in_the_whole_row(case: str, offset: int) -> None:
    """The kernel for a chunk of a row, whose offset is not known when it is compiled, and the reference."""
    rule, inputs = CASES[case]
    spec, queries = AttentionSpec(**rule, scale=0.2), slice(offset, offset + 128)
    part, valid = inputs.part(queries), inputs.segments[:, queries] != 0
    expected = np.asarray(attend_xla(inputs, spec))[:, queries]
    for attend in (partial(attend_chunk, interpret=True), attend_xla):
        compute = jax.jit(lambda offset, attend=attend: attend(part._replace(offset=offset), spec))
        got = np.asarray(compute(part.offset))
        np.testing.assert_allclose(got[valid], expected[valid], atol=1e-5)
        assert np.isfinite(got).all()


FOUR_DEVICES = """
import sys, jax, numpy as np
from functools import partial
sys.path.insert(0, {here!r})
from jax.sharding import NamedSharding, PartitionSpec as P
from test_attention_kernels import *
from pipeline.models.attention.sharding import attend_rows
inputs = AttentionInputs(*(np.repeat(np.asarray(x)[:2], 2, axis=0) for x in random_inputs(4, 2)[:4]), np.asarray(SINKS))
spec = AttentionSpec(causal=True, scale=0.125)
expected = reference(inputs, spec)
mesh = a_mesh(2, 2)
heads, rows = NamedSharding(mesh, P("data", None, "tensor")), NamedSharding(mesh, P("data"))
shardings = AttentionInputs(heads, heads, heads, rows, NamedSharding(mesh, P("tensor")), None, NamedSharding(mesh, P()))
inputs = jax.device_put(inputs, shardings)
flash = partial(attend_rows, partial(attend_flash, interpret=True), mesh)
for kernel in (partial(attend_splash, mesh=mesh, interpret=True), flash):
    attend = jax.jit(lambda x: kernel(x, spec), out_shardings=heads)
    compiled = attend.lower(inputs).compile()
    assert_equal_to(expected, compiled(inputs), inputs.segments)
    text = compiled.as_text()
    assert not any(name in text for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))

# Two devices divide the positions, each with two chunks of 128, and two the heads.
from pipeline.cluster.sharding import make_mesh
from pipeline.models.attention.context import attend_chunks
from pipeline.models.exchange.context import device_chunks, row_chunks
inputs = AttentionInputs(*(np.concatenate([np.asarray(x)] * 2, axis=1)[:2] for x in random_inputs(4, 2)[:4]), SINKS)
inputs = inputs._replace(segments=np.sort(inputs.segments, axis=1))
on_devices, in_rows = device_chunks(2, 512), row_chunks(2, 512)
moved = AttentionInputs(*(np.concatenate([x[:, c] for c in on_devices], axis=1) for x in inputs[:4]), SINKS)
for rule in ({{"causal": True, "window": 120}}, {{"causal": False}}):
    spec = AttentionSpec(scale=0.125, **rule)
    compute = partial(attend_chunks, partial(attend_chunk, interpret=True), make_mesh(2, context=2))
    got = np.asarray(jax.jit(lambda x, spec=spec, compute=compute: compute(x, spec))(moved))
    got = np.concatenate([got[:, c] for c in in_rows], axis=1)
    valid = inputs.segments != 0
    np.testing.assert_allclose(got[valid], np.asarray(attend_xla(inputs, spec))[valid], atol=1e-5)
"""


def test_rows_and_heads_are_divided_without_communication_and_positions_with_it() -> None:
    """In another process, since the number of devices is fixed when JAX starts."""
    script = FOUR_DEVICES.format(here=str(Path(__file__).resolve().parent))
    done = run_program(script, devices=4)
    assert done.returncode == 0, done.stderr


FLASH_CASES = {  # head size of keys and values, length
    "causal": (64, 64, 640, {"causal": True}, None),
    "cap, window and sinks": (80, 80, 192, {"causal": True, "softcap": 1.0, "window": 70}, SINKS),
    "latent": (192, 128, 192, {"causal": False}, None),
}
FURTHER_FLASH_CASES = {
    "small": (32, 32, 640, {"causal": True, "window": 150}, SINKS),
    "unaligned": (72, 40, 333, {"causal": True}, None),
    "96": (96, 96, 640, {"causal": False, "softcap": 5.0}, None),
    "128": (128, 128, 640, {"causal": True}, SINKS),
    "256": (256, 256, 192, {"causal": True, "softcap": 50.0, "window": 100}, None),
    "512": (512, 512, 192, {"causal": True}, None),
}
SLOW_CASES = [pytest.param(case, marks=pytest.mark.slow) for case in FURTHER_FLASH_CASES]


def flash_case(case: str, dtype: str) -> tuple[AttentionInputs, AttentionSpec]:
    head_dim, value_dim, length, rule, sinks = (FLASH_CASES | FURTHER_FLASH_CASES)[case]
    inputs = random_inputs(4, 2, dtype, head_dim, value_dim, length)._replace(sinks=sinks)
    return inputs, AttentionSpec(scale=head_dim**-0.5, **rule)


@pytest.mark.parametrize("case", [*FLASH_CASES, *SLOW_CASES])
def test_flash_equals_the_reference(case: str) -> None:
    inputs, spec = flash_case(case, "float32")
    attend = jax.jit(lambda x: attend_flash(x, spec, interpret=jax.default_backend() != "gpu"))
    with jax.default_matmul_precision("highest"):
        assert_equal_to(reference(inputs, spec), attend(inputs), inputs.segments)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("case", FLASH_CASES | FURTHER_FLASH_CASES)
def test_flash_on_a_gpu_is_as_exact_as_the_reference(case: str) -> None:
    inputs, spec = flash_case(case, "bfloat16")
    got = jax.jit(lambda x: attend_flash(x, spec))(inputs)
    exact = reference(AttentionInputs(*(x.astype(jnp.float32) for x in inputs[:3]), *inputs[3:]), spec)
    assert_equal_to(exact, got.astype(jnp.float32), inputs.segments, atol=2e-2)


def test_flash_lowers_to_one_kernel_without_scores_in_memory() -> None:
    """For a GPU that need not be there."""
    inputs, spec = flash_case("causal", "bfloat16")
    device = AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("data",), abstract_device=device)):
        attend = jax.jit(lambda x: attend_flash(x, spec)).trace(inputs)
        text = attend.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 1
    assert not re.search("stablehlo.(dot|transpose)|640x640", text)


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        (slice(128, 328), {"causal": True, "window": 70}),
        (slice(0, 640), {"causal": False}),
    ],
)
def test_flash_attends_to_keys_before_its_queries(keys: slice, rule: dict) -> None:
    """As on a device that has some of a row's positions. The first query's number among the keys is traced."""
    inputs, spec = flash_case("causal", "float32")[0], AttentionSpec(scale=0.1, **rule)
    queries = slice(200, 328)
    q, k, v, segments = inputs.q[:, queries], inputs.k[:, keys], inputs.v[:, keys], inputs.segments[:, queries]
    part = AttentionInputs(q, k, v, segments, None, inputs.segments[:, keys], queries.start - keys.start)
    got = jax.jit(lambda part: attend_flash(part, spec, interpret=True))(part)
    assert_equal_to(reference(inputs, spec)[:, queries], got, segments)


@settings(max_examples=50, deadline=None)
@given(segments=packings(LONG, BLOCK), causal=st.booleans(), window=st.none() | st.integers(1, LONG))
def test_key_ranges_are_what_the_mask_allows(segments: np.ndarray, causal: bool, window: int | None) -> None:
    spec = AttentionSpec(causal=causal, scale=1, window=window if causal else None)
    order = np.arange(LONG)
    visible = (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] != 0)
    visible = np.asarray(spec.masked(jnp.asarray(visible), order[:, None] - order)) | np.eye(LONG, dtype=bool)
    inputs = AttentionInputs(*[jnp.zeros((2, LONG, 1, 1))] * 3, jnp.asarray(segments))
    first, stop = (np.asarray(numbers)[..., None] for numbers in key_ranges(inputs, spec))
    np.testing.assert_array_equal((order >= first) & (order < stop), visible)
