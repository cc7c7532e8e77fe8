"""Data sets of the Hub: each start reads one commit, which the store records; content determines identity."""

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import composing
from pipeline.core.errors import PipelineError
from pipeline.job.job import Job
from pipeline.job.opening import open_job
from pipeline.store.format.metadata import StoreMetadata
from pipeline.store.write.store_writer import StoreWriter
from tests.hub import Hub, hub_for_this_process, lead_to

pytestmark = pytest.mark.heavy
REPO = "datasets/owner/data"
CARD = b"---\nlicense: mit\n---\n"


def text_rows(word: str) -> bytes:
    return b"".join(json.dumps({"text": f"{word}, number {row}"}).encode() + b"\n" for row in range(9))


def tasks(color: int) -> bytes:
    pairs = [{"input": [[number]], "output": [[color]]} for number in range(3)]
    return json.dumps({"train": pairs[1:], "test": pairs[:1]}).encode() + b"\n"


def parquet(word: str) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": [f"{word} {row}" for row in range(9)], "id": list("abcdefghi")}), sink)
    return sink.getvalue()


HF = {"train.jsonl": text_rows("text"), "README.md": CARD}
ARC = {"train.jsonl": tasks(1), "README.md": CARD}
# By source: options, files, and files with other content.
SOURCES = {
    "hf": (["data=hf", "data.path=owner/data"], HF, {**HF, "train.jsonl": text_rows("other text")}),
    "arc": (["data=arc", "data.path=hf://datasets/owner/data"], ARC, {**ARC, "train.jsonl": tasks(2)}),
    "parquet": (
        ["data=fineweb", "data.path=hf://datasets/owner/data/data"],
        {"data/0.parquet": parquet("text"), "README.md": CARD},
        {"data/0.parquet": parquet("another text"), "README.md": CARD},
    ),
    "generate": (
        ["data=generate", "data@data.prompts=hf", "data.path=owner/data", "batch.length=1024"],
        HF,
        {**HF, "train.jsonl": text_rows("other text")},
    ),
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch) -> Iterator[Hub]:
    with hub_for_this_process(tmp_path, monkeypatch) as server:
        yield server


def job(store: Path, *overrides: str) -> Job:
    return open_job(composing.compose([f"store.path={store}", "capture.layers=[1]", *overrides]))


def made(job: Job, path: Path) -> StoreMetadata:
    """Creates the job's store, as a run does before its first step."""
    return StoreWriter.open(str(path), job.metadata, job.layout).metadata


def revision(metadata: StoreMetadata) -> str | None:
    data = metadata.config["data"]
    return data.get("prompts", data)["revision"]


def first_document(job: Job) -> str:
    return next(job.source.read(0, 0)).text


@pytest.mark.parametrize("kind", SOURCES)
def test_content_determines_identity_and_a_store_is_resumed_at_its_commit(
    kind: str, server: Hub, tmp_path: Path
) -> None:
    options, files, edited = SOURCES[kind]
    commit = server.push(REPO, files)
    first = job(tmp_path / "store", *options)
    card = server.push(REPO, {**files, "README.md": CARD + b"A better description.\n"})
    described = job(tmp_path / "store", *options).metadata
    assert first.metadata.differences(described) == []
    assert [revision(first.metadata), revision(described)] == [commit, card]

    made(first, tmp_path / "store")
    moved = server.push(REPO, edited)
    again = job(tmp_path / "store", *options)
    assert first.metadata.differences(again.metadata) == []
    assert first_document(again) == first_document(first)
    assert revision(again.metadata) == commit
    key = "data.prompts.revision" if kind == "generate" else "data.revision"
    asked = job(tmp_path / "store", *options, f"{key}=main").metadata
    assert revision(asked) == moved
    assert any(difference.key.endswith("_sha256") for difference in first.metadata.differences(asked))


def test_a_store_is_resumed_from_a_copy_on_disk(server: Hub, tmp_path: Path) -> None:
    server.push(REPO, HF)
    first = made(job(tmp_path / "store", "data=hf", "data.path=owner/data"), tmp_path / "store")
    (tmp_path / "copy").mkdir()
    for name, content in HF.items():
        (tmp_path / "copy" / name).write_bytes(content)
    copy = job(tmp_path / "store", "data=hf", f"data.path={tmp_path / 'copy'}").metadata
    assert first.differences(copy) == []


@pytest.mark.parametrize("kind", ["hf", "arc", "parquet"])
def test_all_files_come_from_one_commit(kind: str, server: Hub, tmp_path: Path) -> None:
    options, files, edited = SOURCES[kind]
    commit = server.push(REPO, files)
    expected = first_document(job(tmp_path / "store", *options))

    def push_after_the_first_request(request: str) -> None:
        if len(server.requests) == 2:
            server.push(REPO, edited)

    server.requests.clear()
    server.before = push_after_the_first_request
    opened = job(tmp_path / "store", *options)
    assert first_document(opened) == expected
    assert len(server.commits) == 2
    assert revision(opened.metadata) == commit


def test_a_glob_without_files_is_refused(server: Hub, tmp_path: Path) -> None:
    server.push(REPO, {"a/1.jsonl": text_rows("text"), "b/2.jsonl": text_rows("text")})
    options = ["data=hf", "data.path=owner/data", "data.revision=main"]
    opened = job(tmp_path / "store", *options, "data.data_files=[a/*.jsonl, b/2.jsonl]")
    assert opened.source.shards == ("a/1.jsonl", "b/2.jsonl")
    with pytest.raises(PipelineError, match=r"Unable to find '.*/c/\*.jsonl'.*Set data.path and data.data_files"):
        job(tmp_path / "store", *options, "data.data_files=[a/*.jsonl, c/*.jsonl]")


def test_the_cache_of_datasets_does_not_replace_the_hub(server: Hub, tmp_path: Path, monkeypatch) -> None:
    options, files, _ = SOURCES["arc"]
    server.push(REPO, files)
    made(job(tmp_path / "store", *options), tmp_path / "store")
    lead_to("http://127.0.0.1:1", monkeypatch)
    monkeypatch.setattr("pipeline.core.requests.time", SimpleNamespace(sleep=lambda seconds: None, time=time.time))
    with pytest.raises(PipelineError, match="owner/data cannot be read from the Hub.*try again") as caught:
        job(tmp_path / "store", *options)
    assert caught.value.exit_code == 1
