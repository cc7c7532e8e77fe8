import shutil
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts.demo import make_demo_text
from scripts.demo.make_demo_text import Text

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


def test_the_same_python_writes_the_same_bytes(shards, tmp_path, monkeypatch):
    """Extracts some modules' documents again, and writes all documents again."""
    rows = [row for path in shards for row in pq.read_table(path).to_pylist()]
    texts = [Text(row["id"][len("<python:") : -1], row["file_path"], row["text"]) for row in rows]
    make_demo_text.write_shards(sorted(texts), tmp_path / "again", 6)
    assert [path.read_bytes() for path in sorted((tmp_path / "again").iterdir())] == [
        path.read_bytes() for path in shards
    ]
    library, packages = Path(sysconfig.get_path("stdlib")), ("email", "json")
    for package in packages:
        shutil.copytree(library / package, tmp_path / "library" / package)
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path / "library"))
    extracted = [text for text in texts if text.file.startswith((*packages, "pydoc_data/topics"))]
    assert len(extracted) > 100
    assert make_demo_text.documents() == sorted(extracted)
