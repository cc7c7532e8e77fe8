import json
from collections import Counter
from pathlib import Path

import pytest

from scripts.demo.make_demo_tasks import write_tasks


def contents(out: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in out.iterdir()}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("tasks")
    write_tasks(out, 120)
    return contents(out)


def test_the_same_tasks_of_many_kinds_are_written(tasks, tmp_path):
    kinds = Counter(name.split("-")[0] for name in tasks)
    assert len(kinds) == 10
    assert set(kinds.values()) == {12}
    write_tasks(tmp_path, 120)
    assert contents(tmp_path) == tasks


def test_every_task_is_a_valid_puzzle(tasks):
    for name, text in tasks.items():
        task = json.loads(text)
        assert task.keys() == {"train", "test"}, name
        assert 3 <= len(task["train"]) <= 5, name
        assert 1 <= len(task["test"]) <= 2, name
        pairs = task["train"] + task["test"]
        assert len({json.dumps(pair["input"]) for pair in pairs}) == len(pairs), name
        for pair in pairs:
            assert pair.keys() == {"input", "output"}, name
            assert pair["input"] != pair["output"], name
            for grid in pair.values():
                assert 3 <= len(grid) <= 20, name
                assert len({len(row) for row in grid}) == 1, name
                assert 3 <= len(grid[0]) <= 20, name
                assert {type(cell) for row in grid for cell in row} == {int}, name
                assert {cell for row in grid for cell in row} <= set(range(10)), name


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("transpose", lambda grid: [list(column) for column in zip(*grid, strict=True)]),
        ("crop_to_object", lambda grid: [[cell for cell in row if cell] for row in grid if any(row)]),
    ],
)
def test_outputs_follow_from_inputs(tasks, kind, expected):
    pairs = [pair for name, text in tasks.items() if name.startswith(kind) for pair in json.loads(text)["train"]]
    assert len(pairs) >= 15
    assert [pair["output"] for pair in pairs] == [expected(pair["input"]) for pair in pairs]
