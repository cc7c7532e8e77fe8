"""MLPs of very long rows are computed in parts."""

from functools import partial

import jax
import numpy as np
import pytest

from pipeline.core.sites import Site
from pipeline.models.architecture import Architecture
from pipeline.models.attention.arithmetic import mlp_positions
from pipeline.models.layers import _mlp, mlp_block

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
    ("length", "size"), [(256, 256), (32768, 32768), (36864, 12288), (131072, 16384), (98_317, 14046)]
)
def test_long_rows_are_divided_into_equal_parts(length: int, size: int) -> None:
    """98,317 is a prime number."""
    assert mlp_positions(length) == size


def test_a_row_in_parts_has_the_same_values() -> None:
    rng = np.random.default_rng(0)
    weights = {"up": (F, D), "gate": (F, D), "down": (D, F), "norm": (D,)}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in weights.items()}
    x = rng.normal(size=(2, 36865, D)).astype(np.float32)
    in_parts, whole = (jax.jit(partial(mlp, weights=weights, arch=ARCH))(x) for mlp in (mlp_block, _mlp))
    assert in_parts.keys() == whole.keys() == SITES
    for site, values in whole.items():
        np.testing.assert_array_equal(in_parts[site], values)
