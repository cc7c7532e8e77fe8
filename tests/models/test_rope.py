import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.models.architecture import RotaryPairs
from pipeline.models.families.hf_attention import parse_rope
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.rope import _rotate_by_product, rope_table, rotate_pairs
from tests.models.hf_reference import torch, transformers

llama = pytest.importorskip("transformers.models.llama.modeling_llama")
HEAD_DIM = 64
MAX_POSITIONS = 131072
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": MAX_POSITIONS}
LONG |= {"short_factor": [1 + pair / 7 for pair in range(32)], "long_factor": [2.0] * 32}
PARAMETERS = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": LLAMA3,
    "llama3 of equal factors": LLAMA3 | {"factor": 16.0, "high_freq_factor": 1.0},
    "longrope": LONG,
    "longrope factor": LONG | {"factor": 32.0},
    "longrope attention_factor": LONG | {"factor": 32, "attention_factor": 1.19, "rope_theta": 1e6},
    "yarn": YARN,
    "yarn attention_factor": YARN | {"attention_factor": 1.25, "mscale": 3.0, "mscale_all_dim": 2.0},
    "yarn mscale": YARN | {"factor": 40.0, "mscale": 1.707, "mscale_all_dim": 0.8},
    "yarn one mscale": YARN | {"mscale": 0.7, "factor": 2.5, "original_max_position_embeddings": 8192},
    "yarn betas": YARN | {"beta_fast": 8, "beta_slow": 3.5},
    "yarn not truncated": YARN | {"truncate": False},
    "yarn factor null": YARN | {"factor": None},
    "yarn all pairs": YARN | {"original_max_position_embeddings": 20, "beta_fast": 64},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 4.0},
}
CASES = {name: (parse_rope(HfConfig(values, name), 1e4, MAX_POSITIONS), values) for name, values in PARAMETERS.items()}


def reference(parameters: dict) -> llama.LlamaRotaryEmbedding:
    parameters = dict(parameters)  # a copy, since the config adds to it
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=MAX_POSITIONS, rope_parameters=parameters
    )
    return llama.LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("case", CASES)
def test_rotations_equal_transformers_at_near_and_far_positions(case: str) -> None:
    rope, parameters = CASES[case]
    positions = np.array([[0, 1, 2, 77, 4095], [31, 8191, 0, 32767, 131071]], np.int32)
    x = np.random.default_rng(0).normal(size=(2, 5, 2, HEAD_DIM)).astype(np.float32)
    got = rotate_pairs(jnp.array(x), rope_table(rope, HEAD_DIM, jnp.array(positions), jnp.ones((2, 5), jnp.int32)))
    per_head = torch.from_numpy(x).transpose(1, 2)
    cos, sin = reference(parameters)(per_head, torch.from_numpy(positions.astype(np.int64)))
    expected = llama.apply_rotary_pos_emb(per_head, per_head, cos, sin)[0].transpose(1, 2).numpy()
    np.testing.assert_allclose(got, expected, atol=2e-6)
    unrotated = x[positions == 0] * np.float32(getattr(rope, "attention_factor", 1.0))
    np.testing.assert_array_equal(np.asarray(got)[positions == 0], unrotated)


@pytest.mark.parametrize("in_chunks", [False, True])
def test_longrope_has_long_factors_in_windows_longer_than_the_original_context(in_chunks: bool) -> None:
    """As transformers for each window alone. in_chunks: as mesh.context arranges a row's positions."""
    original, lengths = 24, (24, 25, 3, 60, 40, 30, 1)
    parameters = LONG | {"original_max_position_embeddings": original, "factor": 32.0}
    rope = parse_rope(HfConfig(parameters, "longrope"), 1e4, MAX_POSITIONS)
    positions = np.concatenate([*map(np.arange, lengths), np.zeros(9, int)]).astype(np.int32)
    segments = np.repeat([*range(1, len(lengths) + 1), 0], [*lengths, 9]).astype(np.int32)
    order = np.arange(192).reshape(8, 24)[[0, 7, 1, 6, 2, 5, 3, 4]].ravel() if in_chunks else np.arange(192)
    table = rope_table(rope, HEAD_DIM, *jnp.array([positions, segments])[:, None, order])
    for segment, length in enumerate(lengths, 1):
        cos, sin = reference(parameters)(torch.zeros(1), torch.arange(length)[None])
        for got, expected in zip(table, (cos, sin), strict=True):
            found = np.empty((192, HEAD_DIM // 2), np.float32)
            found[order] = got[0, :, 0]
            np.testing.assert_allclose(found[segments == segment], expected[0, :, : HEAD_DIM // 2], atol=3e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pairs", RotaryPairs)
def test_the_product_for_tpus_is_exact(pairs: RotaryPairs, dtype: str) -> None:
    """Not compiled, since a compiler may fuse either product with the sum and round once."""
    positions = jnp.array([[0, 1, 2, 77, 131071]], jnp.int32)
    table = rope_table(CASES["linear"][0], HEAD_DIM, positions, jnp.ones_like(positions))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 5, 2, HEAD_DIM)), dtype)
    np.testing.assert_array_equal(_rotate_by_product(x, table, pairs), rotate_pairs(x, table, pairs))


@pytest.mark.parametrize("pairs", RotaryPairs)
def test_only_the_first_dimensions_rotate(pairs: RotaryPairs) -> None:
    positions = jnp.array([[0, 1, 2, 77, 131071]], jnp.int32)
    table = rope_table(CASES["default"][0], 16, positions, jnp.ones_like(positions))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 5, 2, HEAD_DIM)), jnp.float32)
    got = rotate_pairs(x, table, pairs)
    np.testing.assert_array_equal(got[..., 16:], x[..., 16:])
    np.testing.assert_array_equal(got[..., :16], rotate_pairs(x[..., :16], table, pairs))


def test_only_tpus_rotate_by_a_product() -> None:
    """The bits of stores made on CPUs depend on this."""
    table = rope_table(CASES["default"][0], HEAD_DIM, *jnp.ones((2, 1, 5), jnp.int32))
    traced = jax.jit(rotate_pairs).trace(jnp.zeros((1, 5, 2, HEAD_DIM)), table)
    multiplies = {
        platform: "dot_general" in traced.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "cuda", "tpu")
    }
    assert multiplies == {"cpu": False, "cuda": False, "tpu": True}
