"""Which requests are repeated. Over plain HTTP, for which no library behind fsspec repeats them."""

import errno
import io
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import aiohttp
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
from gcsfs.retry import HttpError
from huggingface_hub.errors import OfflineModeIsEnabled

from pipeline.config import composing
from pipeline.config.schema import ArcData, ParquetData
from pipeline.core.errors import InputError, PipelineError
from pipeline.core.requests import ATTEMPTS, is_transient
from pipeline.data.arc.loading import open_tasks
from pipeline.data.parquet import ParquetSource
from pipeline.data.text.tokenizer import load_tokenizer
from pipeline.models.registry import open_model
from tests.hub import Hub, contents
from tests.store.fault_proxy import Fault, FaultProxy

TINY = contents(composing.PACKAGE / "assets" / "tiny-qwen2")
TASK = b'{"train": [{"input": [[1]], "output": [[2]]}], "test": [{"input": [[1]], "output": [[2]]}]}'


def answered(status: int) -> aiohttp.ClientResponseError:
    return aiohttp.ClientResponseError(None, (), status=status)


def not_found(cause: Exception | None) -> FileNotFoundError:
    error = FileNotFoundError("http://host/file")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        *((answered(status), True) for status in (408, 429, 500, 502, 503, 504)),
        *((answered(status), False) for status in (400, 401, 403, 404, 416)),
        (aiohttp.ClientPayloadError("cut"), True),
        (aiohttp.InvalidURL("http://["), False),
        (requests.ConnectionError("cut"), True),
        (HttpError({"code": "503", "message": ""}), True),
        (HttpError({"code": 401, "message": ""}), False),
        (OSError("Forbidden: gs://bucket/file"), False),  # gcsfs says so
        (PermissionError(errno.EACCES, "denied"), False),
        (FileNotFoundError(errno.ENOENT, "no such file"), False),
        (not_found(answered(503)), True),
        (not_found(answered(404)), False),
        (OSError(errno.EIO, "input/output error"), True),
        (OSError(errno.EBUSY, "SlowDown"), True),
        (OSError(errno.ENOSPC, "disk full"), False),
        (TimeoutError(), True),
        (OfflineModeIsEnabled("offline"), False),
        (InputError("damaged"), False),
        (PipelineError("repeated already"), False),
        (ValueError("no such name"), False),
    ],
    ids=repr,
)
def test_transient_errors_are_recognised(error: Exception, transient: bool) -> None:
    assert is_transient(error) is transient


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """The seconds of each wait between attempts, which are not slept."""
    waits: list[float] = []
    monkeypatch.setattr("pipeline.core.requests.time", SimpleNamespace(sleep=waits.append))
    return waits


@pytest.fixture
def server() -> Iterator[Hub]:
    """A server of files: a model, a parquet file and a task."""
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": [f"text {row}" for row in range(9)], "id": list("abcdefghi")}), sink)
    fsspec.filesystem("http").clear_instance_cache()
    with Hub().serving() as server:
        server.push("models/owner/files", {**TINY, "0.parquet": sink.getvalue(), "task.json": TASK})
        yield server


def documents(url: str) -> list[str]:
    source = ParquetSource(ParquetData(source="parquet", path=f"{url}/0.parquet", row_groups_per_shard=1))
    return [document.text for document in source.read(0, 0)]


READERS: dict[str, Callable[[str], object]] = {
    "parquet": documents,
    "tasks": lambda url: open_tasks(ArcData(source="arc", path=f"{url}/task.json")).load(0),
    "model": lambda url: open_model(url).identity(),
    "tokenizer": lambda url: load_tokenizer(url).identity(),
}
FAULTS = (Fault.too_many_requests, Fault.unavailable, Fault.refused, Fault.unanswered, Fault.short)


@pytest.mark.parametrize("reader", READERS)
def test_reading_survives_failing_requests(reader: str, server: Hub, waits: list[float]) -> None:
    read, opens_many = READERS[reader], reader == "model"  # hundreds of requests, of which none may fail nine times
    expected = read(f"{server.url}/owner/files/resolve/main")
    with FaultProxy(server.address).serving() as proxy:
        for seed in range(1 if opens_many else 4):
            proxy.reset(0.1 if opens_many else 0.3, seed=seed, kinds=FAULTS)
            fsspec.filesystem("http").clear_instance_cache()
            assert read(f"{proxy.url}/owner/files/resolve/main") == expected
    assert waits


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("status", [403, 404])
def test_refused_requests_are_not_repeated(reader: str, status: int, server: Hub, waits: list[float]) -> None:
    server.statuses = {"models/owner/files": status}
    with pytest.raises(PipelineError):
        READERS[reader](f"{server.url}/owner/files/resolve/main")
    assert waits == []


@pytest.mark.parametrize("reader", READERS)
def test_the_number_of_attempts_is_limited(reader: str, server: Hub, waits: list[float]) -> None:
    server.failures = [(503, {})] * 1000
    with pytest.raises(PipelineError, match="503.*try again") as caught:
        READERS[reader](f"{server.url}/owner/files/resolve/main")
    assert caught.value.exit_code == 1
    assert len(waits) == ATTEMPTS - 1
    assert 60 < sum(waits) < 120
