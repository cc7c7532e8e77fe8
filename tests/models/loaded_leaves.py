"""The leaves of a loaded model as numpy arrays, and their comparison."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from pipeline.core.sites import ActivationKey
from pipeline.models.registry import Model

DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def loaded_leaves(
    model: Model, keys: Sequence[ActivationKey], dtype: str = "float32", **options: bool
) -> dict[str, np.ndarray]:
    """The leaves that `keys` need, by their paths in the tree."""
    flat = jax.tree_util.tree_leaves_with_path(model.load(tuple(keys), dtype, DEVICE, **options))
    return {jax.tree_util.keystr(path): np.asarray(array) for path, array in flat}


def assert_same_leaves(got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(got[name], values, err_msg=name)
