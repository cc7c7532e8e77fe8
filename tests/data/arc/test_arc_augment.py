from math import factorial

import numpy as np
import pytest

from pipeline.config.choices import Geometry
from pipeline.data.arc.augment import Augmentation, augmentation
from pipeline.data.arc.tasks import Pair, Task
from tests.data.arc.undoing import original_task

GRID = np.array([[0, 1, 2], [3, 4, 5]], np.int8)
EVERYTHING = {"geometry": Geometry.dihedral, "permute_colors": True, "permute_examples": True}
NOTHING = {"geometry": Geometry.none, "permute_colors": False, "permute_examples": False}
TASK = Task("t", tuple(Pair(GRID + k, GRID.T + k) for k in range(4)), (Pair(GRID, None), Pair(GRID + 1, GRID)))
PLAIN_COLORS = tuple(range(10))


def same(left: Task, right: Task) -> bool:
    def grids(task: Task) -> list:
        pairs = task.examples + task.tests
        return [None if grid is None else grid.tolist() for pair in pairs for grid in (pair.input, pair.output)]

    return grids(left) == grids(right)


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


def test_recorded_colors_and_order_are_applied():
    change = Augmentation("identity", (1, 0, 2, 3, 4, 5, 6, 7, 8, 9), (2, 0, 3, 1))
    assert change.apply_grid(GRID).tolist() == [[1, 0, 2], [3, 4, 5]]
    shown = change.apply(TASK)
    assert [pair.output.tolist() for pair in shown.examples] == [
        change.apply_grid(TASK.examples[number].output).tolist() for number in (2, 0, 3, 1)
    ]


@pytest.mark.parametrize("version", range(12))
def test_every_version_can_be_undone(version):
    change = augmentation(7, "t", version, 4, **EVERYTHING)
    assert sorted(change.order) == [0, 1, 2, 3]
    assert sorted(change.colors) == list(PLAIN_COLORS)
    assert same(original_task(change, change.apply(TASK)), TASK)
    assert same(change.apply(TASK), TASK) == (version == 0)


def test_a_version_depends_only_on_seed_task_and_number():
    # May never change: existing stores depend on it.
    assert augmentation(0, "t", 1, 3, **EVERYTHING) == Augmentation(
        "rot270_flip", (7, 6, 5, 0, 9, 2, 4, 3, 8, 1), (2, 1, 0)
    )
    several = {augmentation(seed, task, k, 3, **EVERYTHING) for seed in (0, 1) for task in "ab" for k in (1, 2)}
    assert len(several) == 8


@pytest.mark.parametrize(
    ("allowed", "geometries", "colors", "orders"),
    [
        ({}, {"identity"}, 1, 1),
        ({"geometry": Geometry.rotations}, {"identity", "rot90", "rot180", "rot270"}, 1, 1),
        ({"geometry": Geometry.dihedral}, 8, 1, 1),
        ({"permute_colors": True}, {"identity"}, 300, 1),
        ({"permute_examples": True}, {"identity"}, 1, factorial(3)),
    ],
)
def test_only_allowed_properties_are_augmented(allowed, geometries, colors, orders):
    versions = [augmentation(0, "t", version, 3, **(NOTHING | allowed)) for version in range(300)]
    found = {version.geometry for version in versions}
    assert found == geometries if isinstance(geometries, set) else len(found) == geometries
    assert len({version.colors for version in versions}) == colors
    assert len({version.order for version in versions}) == orders
