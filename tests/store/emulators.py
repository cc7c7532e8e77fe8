"""Local emulators of object stores, reached over HTTP like the real ones. Each runs in its own process."""

import json
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.jobs import free_port

# moto needs an older python-dateutil than the one pinned here, so it has its own environment
# (scripts/moto-requirements.txt; made by `make setup-test`).
MOTO_SERVER = Path(f"{sys.prefix}-moto") / "bin" / "moto_server"


@contextmanager
def gcs_emulator() -> Iterator[str]:
    """An in-memory server of Google Cloud Storage's JSON API. Yields host:port."""
    pytest.importorskip("gcp_storage_emulator")
    port = free_port()
    options = ["--host", "127.0.0.1", "--port", str(port), "--in-memory", "--quiet"]
    with _serving([sys.executable, "-m", "gcp_storage_emulator", "start", *options], port) as address:
        yield address


@contextmanager
def s3_emulator() -> Iterator[str]:
    """An in-memory server of Amazon S3's API. Yields host:port."""
    if not MOTO_SERVER.exists():
        pytest.skip(f"{MOTO_SERVER} does not exist: run `make setup-test`")
    port = free_port()
    with _serving([str(MOTO_SERVER), "--host", "127.0.0.1", "--port", str(port)], port) as address:
        yield address


def new_bucket(scheme: str, address: str) -> str:
    """The URL of a new bucket. GCS's emulator always lists a whole bucket, so put only one store into each."""
    name = f"bucket-{uuid.uuid4().hex}"
    if scheme == "gs":
        body = json.dumps({"name": name}).encode()
        headers = {"Content-Type": "application/json"}
        request = Request(f"http://{address}/storage/v1/b", body, headers, method="POST")
    else:
        request = Request(f"http://{address}/{name}", method="PUT")
    urlopen(request).close()
    return f"{scheme}://{name}"


@contextmanager
def _serving(command: Sequence[str], port: int, timeout_s: float = 60) -> Iterator[str]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + timeout_s
        while not _answers(port):
            assert process.poll() is None, f"{command} ended with {process.returncode}"
            assert time.monotonic() < deadline, f"{command} does not answer"
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=10)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
