"""The data of the demo: tasks and text."""

import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts.demo import make_demo_text
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


FINEWEB = ["text", "id", "dump", "url", "date", "file_path", "language", "language_score", "token_count"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> list[Path]:
    out = tmp_path_factory.mktemp("text")
    make_demo_text.write_shards(make_demo_text.documents(), out)
    return sorted(out.iterdir())


def test_the_shards_have_finewebs_schema_and_several_row_groups(shards):
    assert [path.name for path in shards] == [f"{number:03}_00000.parquet" for number in range(6)]
    for path in shards:
        file = pq.ParquetFile(path)
        assert file.schema_arrow.names == FINEWEB
        assert file.schema_arrow.field("text").type == pa.string()
        assert file.schema_arrow.field("token_count").type == pa.int64()
        assert file.num_row_groups > 1


def test_the_documents_are_real_and_unique(shards):
    table = pa.concat_tables(pq.read_table(path) for path in shards)
    texts = dict(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))
    assert len(texts) == table.num_rows > 1000
    assert sum(map(len, texts.values())) > 2_000_000
    assert min(map(len, texts.values())) >= 120
    assert "Create a queue object with a given maximum size." in texts["<python:queue.Queue>"]
    assert texts["<python:topics.while>"].startswith('The "while" statement')
    assert table["token_count"].to_pylist() == [len(text.split()) for text in table["text"].to_pylist()]
