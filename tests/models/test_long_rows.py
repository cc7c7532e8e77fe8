"""MLPs of very long rows are computed in parts."""

from functools import partial

import jax
import numpy as np
import pytest

from pipeline.core.sites import Site
from pipeline.models.architecture import Architecture
from pipeline.models.layers import _mlp, mlp_block, mlp_parts

D, F = 8, 16
SITES = {Site.mlp_in, Site.mlp_pre, Site.mlp_pre_linear, Site.mlp_post, Site.mlp_out}
ARCH = Architecture(
    num_layers=1,
    vocab_size=10,
    max_positions=1 << 17,
    d_model=D,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    d_mlp=F,
    norm_eps=1e-6,
    rope=None,
)


@pytest.mark.parametrize(
    ("length", "parts"),
    [(256, 1), (32768, 1), (36864, 3), (65536, 4), (100_000, 8), (131072, 8), (98_317, 1)],
)
def test_the_number_of_parts_divides_the_length(length: int, parts: int) -> None:
    """98,317 is a prime number."""
    assert mlp_parts(length) == parts


def test_a_row_in_parts_has_the_same_values() -> None:
    rng = np.random.default_rng(0)
    weights = {"up": (F, D), "gate": (F, D), "down": (D, F), "norm": (D,)}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in weights.items()}
    x = rng.normal(size=(2, 36864, D)).astype(np.float32)
    in_parts, whole = (jax.jit(partial(mlp, weights=weights, arch=ARCH))(x) for mlp in (mlp_block, _mlp))
    assert in_parts.keys() == whole.keys() == SITES
    for site, values in whole.items():
        np.testing.assert_array_equal(in_parts[site], values)
