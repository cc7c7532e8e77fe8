"""Parquet files as documents."""

import io
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from material import damage_column, text_stream, word_tokenizer, words, write_parquet

from pipeline.config.choices import OnError
from pipeline.config.schema import ParquetData
from pipeline.core.errors import InputError
from pipeline.data.documents import Document, SkippedDocument
from pipeline.data.parquet import ParquetSource


def source(path, **settings) -> ParquetSource:
    return ParquetSource(ParquetData(source="parquet", path=str(path), **settings))


def write(path, **columns) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_parquet(str(path), columns)


def invalid_utf8(count: int) -> pa.Array:
    """`count` strings; the second is not UTF-8."""
    values = pa.array([b"fine" if number != 1 else b"\xff\xfe" for number in range(count)], pa.binary())
    return pa.Array.from_buffers(pa.string(), count, values.buffers())


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "b.parquet", text=["four"], id=["4"], url=["u4"], token_count=[1], other=[0])
    write(tmp_path / "a.parquet", text=["one", "two", "three"], id=["1", "2", "3"], url=["u1", None, "u3"])
    write(tmp_path / "deep" / "c.parquet", text=["five"], id=["5"])
    write(tmp_path / "_delta" / "d.parquet", text=["no"], id=["no"])
    (tmp_path / "notes.txt").write_text("no")
    return tmp_path


def test_info_columns_are_those_of_fineweb_in_the_first_file(folder):
    assert source(folder / "b.parquet").info_schema == pa.schema([("url", pa.string()), ("token_count", pa.int64())])
    assert next(source(folder).read(2, 0)).info == {"url": None}
    assert [document.id for document in source(folder / "b.parquet", id_column=None).read(0, 0)] == ["b.parquet#0"]


@pytest.mark.parametrize("groups", [1, 2, 3, 9])
def test_row_groups_as_shards_give_the_same_documents(tmp_path, groups):
    """Eleven rows, in groups of three."""
    write(tmp_path / "a.parquet", text=[f"t{number}" for number in range(11)], id=list(range(11)))
    whole, parts = source(tmp_path), source(tmp_path, row_groups_per_shard=groups)
    assert parts.shards == tuple(f"a.parquet[{first}:{min(first + groups, 4)}]" for first in range(0, 4, groups))
    documents = list(whole.read(0, 0))
    assert [document for shard in range(len(parts.shards)) for document in parts.read(shard, 0)] == documents
    assert [document for shard in range(len(parts.shards)) for document in parts.read(shard, 7)] == documents[7:]
    assert parts.fingerprint() != whole.fingerprint()


TEXT_TYPES = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()]


@pytest.mark.parametrize("kind", [*TEXT_TYPES, pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_all_string_types_are_read(tmp_path, kind):
    texts, urls = pa.array(["x", "é"]).cast(kind), pa.array(["u", None]).cast(kind)
    write(tmp_path / "a.parquet", text=texts, id=texts, url=urls)
    assert [(document.text, document.id, document.info["url"]) for document in source(tmp_path).read(0, 0)] == [
        ("x", "x", "u"),
        ("é", "é", None),
    ]


@pytest.mark.parametrize(
    ("column", "value", "reason"), [("text", None, "is null"), ("text", "", "is empty"), ("id", None, "is null")]
)
def test_a_bad_row_is_reported_or_skipped(tmp_path, column, value, reason):
    write(tmp_path / "a.parquet", **({"text": ["a", "b", "c"], "id": ["1", "2", "3"]} | {column: ["a", value, "b"]}))
    with pytest.raises(InputError, match=rf"a.parquet row 1: '{column}' {reason}.*data.on_error=skip"):
        list(source(tmp_path).read(0, 0))
    first, second, third = source(tmp_path, on_error=OnError.skip).read(0, 0)
    assert (first.index, third.index) == (0, 2)
    assert second == SkippedDocument("a.parquet", 1, f"'{column}' {reason}")


@pytest.mark.parametrize(("column", "name"), [("text", "the text"), ("id", "its id"), ("url", "its url")])
def test_a_row_that_is_not_utf8_is_reported_or_skipped(tmp_path, column, name):
    columns = {"text": ["w1", "w2", "w3"], "id": ["1", "2", "3"], "url": ["u", "v", "w"]}
    write(tmp_path / "a.parquet", **(columns | {column: invalid_utf8(3)}))
    settings = {"rows_per_block": 3, "length": 4}
    with pytest.raises(InputError, match=rf"a.parquet row 1 .*{name} has a lone surrogate, so is not UTF-8"):
        list(text_stream(source(tmp_path), word_tokenizer(), **settings).blocks())
    lenient = source(tmp_path, on_error=OnError.skip)
    [block] = text_stream(lenient, word_tokenizer(), **settings, on_error=OnError.skip).blocks()
    assert (block.table["index"].to_pylist(), [skip.index for skip in block.skipped]) == ([0, 2], [1])


def truncate(path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("row_groups_per_shard", [None, 1])
def test_a_truncated_file_is_reported_or_skipped_with_one_record(folder, row_groups_per_shard):
    truncate(folder / "a.parquet")
    settings = {"row_groups_per_shard": row_groups_per_shard}
    with pytest.raises(InputError, match=r"a.parquet, footer: not readable as parquet.*Download it again"):
        source(folder, **settings)
    opened = source(folder, on_error=OnError.skip, **settings)
    assert len(opened.shards) == 3
    (skipped,) = opened.read(0, 0)
    assert (skipped.source, skipped.index, skipped.rows) == ("a.parquet", 0, None)
    assert skipped.reason.startswith("footer: not readable as parquet: ")
    assert next(opened.read(1, 0)).id == "4"
    assert opened.info_schema.names == ["url", "token_count"]
    with pytest.raises(InputError, match=r"a.parquet, footer: not readable as parquet"):
        source(folder / "a.parquet", on_error=OnError.skip)  # none would be left


@pytest.mark.parametrize("on_error", OnError)
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"content": ["a"], "id": ["1"]}, r"no column 'text', only 'content', 'id'. Set data.text_column"),
        ({"text": ["a"], "key": ["1"]}, r"no column 'id', only 'text', 'key'. Set data.id_column"),
        ({"text": [1], "id": ["1"]}, r"a.parquet: column 'text' is int64, expected strings"),
        ({"text": ["a"], "id": [1.5]}, r"a.parquet: column 'id' is double, expected strings"),
        (
            {"text": ["a"], "id": ["1"], "token_count": ["many"]},
            "'token_count' is string, which cannot be converted to",
        ),
        ({"text": ["a"], "id": ["1"], "url": ["u"], "twice": ["v"]}, "a.parquet has 2 columns 'url', expected one"),
    ],
)
def test_wrong_columns_always_fail(tmp_path, columns, message, on_error):
    """Those of the first file before the run; those of a later one when it is read."""
    table = pa.table(columns)
    table = table.rename_columns([name.replace("twice", "url") for name in table.column_names])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match=message):
        list(source(tmp_path, on_error=on_error).read(0, 0))
    pq.write_table(table, tmp_path / "za.parquet")
    write(tmp_path / "a.parquet", text=["a"], id=["1"], token_count=[1])
    opened = source(tmp_path, on_error=on_error)
    with pytest.raises(InputError, match=message):
        list(opened.read(1, 0))


def damaged_in_the_middle(folder) -> None:
    """Writes nine rows in groups of three, the second damaged, and another sound file."""
    write(folder / "a.parquet", text=[words([number + 2] * 2) for number in range(9)], id=list("012345678"))
    damage_column(folder / "a.parquet", group=1)
    write(folder / "b.parquet", text=[words([20])], id=["b"])


@pytest.mark.parametrize("start", [0, 1, 2, 3, 7])
def test_only_the_damaged_row_group_is_skipped(tmp_path, start):
    damaged_in_the_middle(tmp_path)
    with pytest.raises(InputError, match=r"a.parquet row 3: not readable as parquet.*or set data.on_error=skip"):
        list(source(tmp_path).read(0, min(start, 5)))
    items = list(source(tmp_path, on_error=OnError.skip).read(0, start))
    skips = [item for item in items if isinstance(item, SkippedDocument)]
    documents = [item.id for item in items if isinstance(item, Document)]
    assert documents == [str(row) for row in (0, 1, 2, 6, 7, 8) if row >= start]
    assert [(skip.source, skip.index, skip.rows) for skip in skips] == [("a.parquet", 3, 3)] * (start < 6)
    assert all(skip.reason.startswith("not readable as parquet: ") for skip in skips)


@pytest.mark.parametrize("path", ["nothing", "*.parquet", "."])
def test_a_path_without_parquet_files_is_refused(tmp_path, path):
    with pytest.raises(InputError, match=r"has no \.parquet file\. Set data.path.*data=hf data.path=json"):
        source(tmp_path / path)


def test_the_refusal_of_another_format_names_the_data_that_reads_it(tmp_path):
    (tmp_path / "rows.jsonl").write_text("w2 w3")
    with pytest.raises(
        InputError, match=r"rows.jsonl, footer: not readable as parquet.*For JSON, CSV or text: data=hf"
    ):
        source(tmp_path / "rows.jsonl")


class CountedFile(io.FileIO):
    """Counts the bytes read from all such files."""

    num_bytes = 0

    def read(self, size: int = -1) -> bytes:
        data = super().read(size)
        CountedFile.num_bytes += len(data)
        return data


def test_resuming_reads_only_the_footer_and_later_row_groups(tmp_path, monkeypatch):
    """A hundred rows of 10 kB in ten groups: from row 85 on, two groups and at most 64 KiB of footer."""
    columns = {"text": [f"{number:04d}" * 2500 for number in range(100)], "id": range(100), "other": ["o" * 9000] * 100}
    pq.write_table(
        pa.table({name: list(values) for name, values in columns.items()}),
        tmp_path / "a.parquet",
        row_group_size=10,
        compression="none",
        use_dictionary=False,
    )
    opened = source(tmp_path)
    monkeypatch.setattr(LocalFileSystem, "open", lambda self, path, mode: CountedFile(path, mode))
    assert [document.id for document in opened.read(0, 85)] == [str(number) for number in range(85, 100)]
    assert 200_000 < CountedFile.num_bytes < 270_000


def test_large_rows_are_read_in_small_batches(tmp_path, monkeypatch):
    path = str(tmp_path / "a.parquet")
    texts = ["w2", "w3" * 50, "w4", "w5", "w6" * 40, "w7"]
    pq.write_table(pa.table({"text": texts, "id": [str(row) for row in range(6)]}), path)
    monkeypatch.setattr("pipeline.data.rows._BYTES_PER_READ", 150)
    for start in (0, 1, 4, 6):
        documents = list(source(path).read(0, start))
        assert [(d.index, d.id, d.text) for d in documents] == [(r, str(r), texts[r]) for r in range(start, 6)]


# A thread of pyarrow is in Python's `read` for the feed's thread when the main thread ends.
ENDS_WHILE_READING = """
import io, sys, threading, time
from fsspec.implementations.local import LocalFileSystem
from pipeline.config.schema import ParquetData
from pipeline.data.parquet import ParquetSource

begun = threading.Event()

class SlowFile(io.FileIO):
    def read(self, size=-1):
        if is_open:
            begun.set()
            time.sleep(0.5)
        return super().read(size)

is_open = False
source = ParquetSource(ParquetData(source="parquet", path=sys.argv[1]))
LocalFileSystem.open = lambda self, path, mode: SlowFile(path, mode)
documents = source.read(0, 0)
print(next(documents).text)
begun.clear()
is_open = True
threading.Thread(target=list, args=(documents,), daemon=True).start()
begun.wait()
"""


def test_the_process_waits_for_a_read_at_its_end(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(str(path), {"text": [f"text {k}" for k in range(8)], "id": list("abcdefgh")}, row_group_size=2)
    command = [sys.executable, "-c", ENDS_WHILE_READING, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, "text 0\n"), result.stderr
