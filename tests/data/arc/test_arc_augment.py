from math import factorial

import numpy as np
import pytest

from pipeline.config.schema import ArcData
from pipeline.data.arc.tasks import Augmentation, Pair, Task, augmentation

GRID = np.array([[0, 1, 2], [3, 4, 5]], np.int8)
TASK = Task("t", tuple(Pair(GRID + k, GRID.T + k) for k in range(4)), (Pair(GRID, None), Pair(GRID + 1, GRID)))
PLAIN_COLORS = tuple(range(10))


def augmented(seed: int, name: str, version: int, num_examples: int, **settings) -> Augmentation:
    config = ArcData(source="arc", path="", seed=seed, **settings)
    return augmentation(config, Task(name, TASK.examples[:num_examples], TASK.tests), version)


@pytest.mark.parametrize(
    ("geometry", "expected"),
    [
        ("identity", [[0, 1, 2], [3, 4, 5]]),
        ("rot90", [[2, 5], [1, 4], [0, 3]]),
        ("rot180", [[5, 4, 3], [2, 1, 0]]),
        ("rot270", [[3, 0], [4, 1], [5, 2]]),
        ("flip", [[2, 1, 0], [5, 4, 3]]),
        ("rot90_flip", [[5, 2], [4, 1], [3, 0]]),
        ("rot180_flip", [[3, 4, 5], [0, 1, 2]]),
        ("rot270_flip", [[0, 3], [1, 4], [2, 5]]),
    ],
)
def test_geometries_transform_the_grid(geometry, expected):
    change = Augmentation(geometry, PLAIN_COLORS, ())
    assert change.apply_grid(GRID).tolist() == expected


def test_a_version_depends_only_on_seed_task_and_number():
    # May never change: existing stores depend on it.
    assert augmented(0, "t", 1, 3) == Augmentation("rot270_flip", (7, 6, 5, 0, 9, 2, 4, 3, 8, 1), (2, 1, 0))
    several = {augmented(seed, task, k, 3) for seed in (0, 1) for task in "ab" for k in (1, 2)}
    assert len(several) == 8


@pytest.mark.parametrize(
    ("augment", "num_geometries", "num_colors", "num_orders"),
    [
        ("dihedral+colors+examples", 8, 300, factorial(3)),
        ("dihedral", 8, 1, 1),
        ("rotations", 4, 1, 1),
        ("colors", 1, 300, 1),
        ("rotations+examples", 4, 1, factorial(3)),
    ],
)
def test_only_the_named_parts_are_changed(augment, num_geometries, num_colors, num_orders):
    versions = [augmented(0, "t", version, 3, augment=augment) for version in range(300)]
    assert len({version.geometry for version in versions}) == num_geometries
    assert not ("rotations" in augment and any("flip" in version.geometry for version in versions))
    assert len({version.colors for version in versions}) == num_colors
    assert len({version.order for version in versions}) == num_orders
