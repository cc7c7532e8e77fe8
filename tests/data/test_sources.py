import json
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from fsspec.implementations.local import LocalFileSystem
from material import word_tokenizer, write_parquet

from pipeline.config.choices import OnError
from pipeline.config.schema import ArcData, HfData, ParquetData
from pipeline.core.errors import InputError, PipelineError
from pipeline.data.documents import DOCUMENT_SCHEMA, Document, SkippedDocument, Source
from pipeline.data.sources import open_source

# The contract of `Source`, for every kind of file.


def write_parquet_rows(path: Path, texts: list[str | None]) -> None:
    write_parquet(str(path), {"text": pa.array(texts, pa.string()), "id": [f"d{n}" for n in range(len(texts))]})


def write_json(path: Path, texts: list[str | None]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_csv(path: Path, texts: list[str | None]) -> None:
    path.write_text("text,more\n" + "".join(f"{text or ''},x\n" for text in texts))


def write_tasks(path: Path, texts: list[str | None]) -> None:
    tasks = [{"train": [], "test": [{"input": text and [[len(text) % 10]]}]} for text in texts]
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))


KINDS = {  # by the name of the file: how it is written, and the configuration
    "a.parquet": (write_parquet_rows, partial(ParquetData, source="parquet")),
    "groups.parquet": (write_parquet_rows, partial(ParquetData, source="parquet", row_groups_per_shard=2)),
    "hf.parquet": (write_parquet_rows, partial(HfData, source="hf")),
    "a.jsonl": (write_json, partial(HfData, source="hf")),
    "a.csv": (write_csv, partial(HfData, source="hf")),
    "arc.jsonl": (write_tasks, partial(ArcData, source="arc")),
}
TEXTS = [f"w{n} " * n for n in range(1, 9)]


def opened(folder: Path, kind: str, texts: list[str | None], **settings) -> Source:
    write, config = KINDS[kind]
    folder.mkdir(exist_ok=True)
    write(folder / kind, texts)
    path = folder / kind if kind == "arc.jsonl" else folder
    return open_source(config(path=str(path), **settings), word_tokenizer())


def documents(source: Source) -> list[Document | SkippedDocument]:
    return [item for shard in range(len(source.shards)) for item in source.read(shard, 0)]


@pytest.mark.parametrize("kind", KINDS)
def test_reading_starts_at_any_row(tmp_path, kind):
    source = opened(tmp_path, kind, TEXTS)
    assert isinstance(source, Source)
    assert not set(source.info_schema.names) & set(DOCUMENT_SCHEMA.names)
    assert [document.index for document in documents(source)] == list(range(len(TEXTS)))
    assert kind == "arc.jsonl" or [document.text for document in documents(source)] == TEXTS
    for shard in range(len(source.shards)):
        whole = list(source.read(shard, 0))
        for start in range(len(TEXTS) + 1):
            assert list(source.read(shard, start)) == [document for document in whole if document.index >= start]


@pytest.mark.parametrize("kind", KINDS)
def test_documents_and_fingerprint_do_not_depend_on_the_location(tmp_path, kind):
    here, there = (opened(tmp_path / place, kind, TEXTS) for place in ("here", "there"))
    assert documents(here) == documents(there)
    assert here.shards == there.shards
    assert here.fingerprint() == there.fingerprint() == json.loads(json.dumps(there.fingerprint()))
    assert opened(tmp_path / "other", kind, TEXTS[1:]).fingerprint() != here.fingerprint()


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_row_is_reported_or_skipped(tmp_path, kind):
    texts = [*TEXTS[:4], None, *TEXTS[5:]]
    with pytest.raises(InputError, match=r"(row|line) [45].*data.on_error=skip") as caught:
        documents(opened(tmp_path, kind, texts))
    assert caught.value.exit_code == 2
    items = documents(opened(tmp_path, kind, texts, on_error=OnError.skip))
    assert [item.index for item in items] == list(range(len(TEXTS)))
    assert [item.index for item in items if isinstance(item, SkippedDocument)] == [4]


@pytest.mark.parametrize("on_error", OnError)
@pytest.mark.parametrize("kind", KINDS)
def test_failing_storage_is_not_damage_and_may_be_tried_again(tmp_path, kind, on_error, monkeypatch):
    def fail(self, path, *_args, **_options):
        raise OSError("Forbidden: not today")  # like remote storage, without errno

    source = opened(tmp_path, kind, TEXTS, on_error=on_error) if kind != "arc.jsonl" else None
    for call in ("_open", "cat_file"):
        monkeypatch.setattr(LocalFileSystem, call, fail)
    with pytest.raises(PipelineError, match="cannot be read: Forbidden: not today.*try again") as caught:
        documents(source or opened(tmp_path, kind, TEXTS, on_error=on_error))
    assert caught.value.exit_code == 1
