"""Footers are read once for all processes, and a store is extended only from the files that it was made from."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import composing
from pipeline.config.schema import ParquetData
from pipeline.core.errors import InputError, PipelineError
from pipeline.data.files import find_files
from pipeline.data.manifest import FileEntry, Manifest, entries_to_bytes, file_entries
from pipeline.data.parquet import ParquetSource, make_manifest
from pipeline.job.job import Job
from pipeline.job.opening import open_job
from pipeline.job.running import open_store
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.keys import MANIFEST_KEY
from tests.hub import Hub, hub_for_this_process
from tests.jobs import run_here

REPO = "datasets/owner/data"
FILES = 7


def parquet(rows: int = 10, row_group_size: int = 2, word: str = "text") -> bytes:
    sink = io.BytesIO()
    table = pa.table({"text": [f"{word} {row}" for row in range(rows)], "id": [f"{row}" for row in range(rows)]})
    pq.write_table(table, sink, row_group_size=row_group_size, compression="none", use_dictionary=False)
    return sink.getvalue()


CONTENT = {f"data/{number}.parquet": parquet() for number in range(FILES)}


@pytest.fixture
def server(tmp_path: Path, monkeypatch) -> Iterator[Hub]:
    with hub_for_this_process(tmp_path, monkeypatch) as server:
        server.push(REPO, CONTENT)
        yield server


def job(store: Path, *overrides: str) -> Job:
    """Opens the job as a new process would."""
    huggingface_hub.HfFileSystem.clear_instance_cache()
    options = ["data=fineweb", "data.path=hf://datasets/owner/data/data", "data.revision=main", "capture.layers=[1]"]
    return open_job(composing.compose([*options, "data.row_groups_per_shard=2", f"store.path={store}", *overrides]))


def begun(store: Path, *overrides: str) -> Job:
    """A job whose store was created."""
    opened = job(store, *overrides)
    open_store(opened)
    opened.manifest.keep()
    return opened


def footers(server: Hub) -> list[str]:
    """The names of the files read, one per request."""
    read = [request.rpartition("/")[2] for request in server.requests if request.startswith("GET /datasets/")]
    server.requests.clear()
    return sorted(read)


NAMES = [f"{number}.parquet" for number in range(FILES)]


def test_other_processes_send_no_requests(server: Hub, tmp_path: Path) -> None:
    config = job(tmp_path / "store").config.data
    manifest = make_manifest(config)
    server.requests.clear()
    given = ParquetSource(config, lambda make: Manifest.from_json(manifest.to_json()))
    assert server.requests == []
    own = ParquetSource(config)
    assert given.shards == own.shards
    assert given.fingerprint() == own.fingerprint()
    assert given.info_schema == own.info_schema
    assert list(given.read(20, 0)) == list(own.read(20, 0)) != []


def test_files_as_shards_need_no_footers(server: Hub, tmp_path: Path) -> None:
    begun(tmp_path / "store", "data.row_groups_per_shard=null")
    assert {*footers(server)} == {NAMES[0]}


def rewritten(values: dict) -> bytes:
    """A manifest with other entries and the right digest."""
    return entries_to_bytes(FileEntry(*entry) for entry in values["files"])


def with_entry(*entry: object) -> Callable[[bytes], bytes]:
    return lambda content: rewritten({"files": [entry, *json.loads(content)["files"][1:]]})


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda content: None,
    "cut": lambda content: content[:-5],
    "no object": lambda content: b"[1, 2]",
    "not UTF-8": lambda content: b"\xff" + content,
    "deep": lambda content: b"[" * 100_000,
    "edited": lambda content: content.replace(b"0.parquet", b"9.parquet"),
    "of another version": lambda content: content.replace(b'"version": 1', b'"version": 2'),
    "no name": with_entry(["0.parquet"], len(parquet()), "blob_id:0", None, None),
    "too few columns": lambda content: rewritten({"files": []}).replace(b"[]", b"[[1]]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_manifest_is_replaced(damage: str, server: Hub, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shards = begun(store).source.shards
    manifest = (store / MANIFEST_KEY).read_bytes()
    damaged = DAMAGE[damage](manifest)
    assert damaged != manifest
    (store / MANIFEST_KEY).unlink() if damaged is None else (store / MANIFEST_KEY).write_bytes(damaged)
    assert begun(store).source.shards == shards
    assert (store / MANIFEST_KEY).read_bytes() == manifest


CHANGES = {
    "another size": {**CONTENT, "data/3.parquet": parquet(word="other text")},
    "a new file": {**CONTENT, "data/9.parquet": parquet()},
    "a file less": {name: CONTENT[name] for name in [*CONTENT][:-1]},
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_files_are_other_data(change: str, server: Hub, tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = begun(store)
    server.push(REPO, CHANGES[change])
    again = job(store)
    assert "data.files_sha256" in [difference.key for difference in first.metadata.differences(again.metadata)]
    assert again.source.shards == ParquetSource(again.config.data).shards


def test_a_file_replaced_during_a_job_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet())
    source = ParquetSource(ParquetData(source="parquet", path=str(tmp_path), row_groups_per_shard=1))
    size = path.stat().st_size
    path.write_bytes(parquet(row_group_size=5))
    with pytest.raises(InputError, match=f"a.parquet has.* bytes, but had {size} when.*Restore the file"):
        list(source.read(1, 0))


def grids(color: int) -> bytes:
    pairs = [{"input": [[number, color]], "output": [[color] * 9] * 9} for number in range(3)]
    return json.dumps({"train": pairs[1:], "test": pairs[:1]}).encode()


FORMATS = {  # options, a file's content, and what is replaced in it
    "a.parquet": (["data=fineweb"], parquet(99, word="a long text"), b"a long text 7"),
    "b.jsonl": (
        ["data=hf"],
        b"".join(b'{"text": "text %d with words"}\n' % number for number in range(99)),
        b"text 98",
    ),
    "c.json": (["data=arc", "data.augmentations=9"], grids(7), b"7, 7"),
}


@pytest.mark.usefixtures("cached_steps")
@pytest.mark.parametrize("name", FORMATS)
def test_a_store_is_extended_only_from_the_files_that_it_was_made_from(name: str, tmp_path: Path) -> None:
    options, content, part = FORMATS[name]
    options = [*options, f"store.path={tmp_path / 'store'}", "capture.layers=[0]", "batch.rows=1", "batch.length=32"]
    options += ["store.rows_per_block=1", "data.num_streams=1"]

    def run_from(folder: str, tokens: int, **files: bytes) -> None:
        for file, text in files.items():
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"{file}{name}").write_bytes(text)
        run_here(*options, f"data.path={tmp_path / folder}", f"run.max_tokens={tokens}")

    run_from("here", 32, x=content)
    run_from("copy", 64, x=content)
    refused = {
        f"x{name} \\(other content\\)": {"x": content.replace(part, part.replace(b"7", b"6").swapcase(), 1)},
        f"z{name} \\(new\\)": {"x": content, "z": content},
        f"x{name} \\(missing\\)": {"y": content},
    }
    for folder, (difference, files) in enumerate(refused.items()):
        with pytest.raises(PipelineError, match=f"input files are not those .*{difference}.*Restore these files") as no:
            run_from(f"{folder}", 96, **files)
        assert no.value.exit_code == 2
    assert verify_store(str(tmp_path / "store")) == []


@pytest.mark.parametrize("size", [0, 1, 4 << 20, 5 << 20])
def test_a_file_is_identified_by_its_content(size: int, tmp_path: Path) -> None:
    """At any size up to 4 MiB every byte counts, and above it the beginning and the end."""

    def entry(content: bytes) -> FileEntry:
        (tmp_path / "a.txt").write_bytes(content)
        [file] = file_entries(find_files(str(tmp_path), ".txt"))
        return file

    before = entry(bytes(size))
    assert entry(bytes(size)) == before
    assert entry(bytes(size + 1)).change(before) == f"a.txt ({size + 1} bytes, earlier {size})"
    middle = [size // 3] if size <= 4 << 20 else []
    for place in {0, size - 1, *middle} & {*range(size)}:
        changed = bytes(place) + b"x" + bytes(size - place - 1)
        assert entry(changed).change(before) == "a.txt (other content)"
