import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "demo" / "make_demo_text.py"
FINEWEB = ["text", "id", "dump", "url", "date", "file_path", "language", "language_score", "token_count"]


def make(out: Path, *arguments: str) -> list[Path]:
    subprocess.run([sys.executable, SCRIPT, "--out", out, *arguments], check=True, capture_output=True, timeout=120)
    return sorted(out.iterdir())


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> list[Path]:
    return make(tmp_path_factory.mktemp("text"))


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
    assert sum(map(len, texts.values())) > 2_500_000
    assert min(map(len, texts.values())) >= 120
    assert "Create a queue object with a given maximum size." in texts["<python:queue.Queue>"]
    assert texts["<python:topics.while>"].startswith('The "while" statement')
    assert table["token_count"].to_pylist() == [len(text.split()) for text in table["text"].to_pylist()]


def test_the_same_python_writes_the_same_bytes(shards, tmp_path):
    again = make(tmp_path, "--shards", "6")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in shards]
