"""A local HTTP server through which TensorStore reads from the Hugging Face Hub. Each process has its own.

TensorStore reads from HTTP servers but does not follow redirects, which the Hub uses for large files. So it sends its
requests to this server, which gets the files from the Hub (`HubFiles`), retries failed requests, and only sends
complete answers.

The Hub may make a client wait for minutes, while TensorStore gives up on a server that sends nothing for one minute. A
request that takes long is therefore answered with 503. TensorStore then sends it again, and gets the answer to the
first one.
"""

import os
import re
import secrets
import threading
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from huggingface_hub.utils import httpx

from pipeline.core.errors import PipelineError, StoreInvalid
from pipeline.store.io.hub_files import HubAnswer, HubFiles, open_hub_files

# HTTP statuses. TensorStore does not retry the first two: such requests were already retried here.
_REFUSED, _FAILED, _LATER = 403, 424, 503
_PATIENCE_S = 30.0  # before a request is answered with 503
_KEPT_S = 300.0  # how long an answer is kept after the last request for it; TensorStore retries within a minute
_HOST = "127.0.0.1"

Request = tuple[HubFiles, str, str | None]  # the files, a key, and a range of bytes


@dataclass
class _PendingRequest:
    """A request to the Hub. last_s: when TensorStore last sent it, by the monotonic clock."""

    future: Future[HubAnswer]
    last_s: float


class HubRelay:
    """The server of this process. Use `hub_relay`."""

    def __init__(self) -> None:
        self.password = f"Bearer {secrets.token_urlsafe()}"  # keeps other users of the machine from private stores
        self._mounted: list[HubFiles] = []
        self._pending: dict[Request, _PendingRequest] = {}
        self._lock = threading.Lock()
        server = _Server((_HOST, 0), lambda *args: _Handler(self, *args))
        self._url = f"http://{_HOST}:{server.server_port}"
        threading.Thread(target=server.serve_forever, name="hub-relay", daemon=True).start()

    def spec(self, path: str) -> dict[str, Any]:
        """TensorStore's spec of a key-value store with the files at a path on the Hub; see `open_hub_files`."""
        files = open_hub_files(path)
        with self._lock:
            if files not in self._mounted:
                self._mounted.append(files)
            number = self._mounted.index(files)
        _bypass_proxy()
        headers = [f"Authorization: {self.password}"]
        return {"driver": "http", "base_url": self._url, "path": f"/{number}/", "headers": headers}

    def find(self, path: str) -> tuple[HubFiles, str]:
        """The files that a path of this server (or of a key-value store's spec) refers to, and the key in them."""
        _, number, key = path.split("/", 2)
        return self._mounted[int(number)], key

    def answer(self, request: Request) -> HubAnswer | None:
        """The Hub's answer; None if it takes so long that TensorStore would give up. A later call with the same request
        then returns it. Raises like `HubFiles.get`."""
        now = time.monotonic()
        with self._lock:
            self._drop_abandoned(now)
            pending = self._pending.get(request)
            if pending is None:
                pending = self._pending[request] = _PendingRequest(Future(), now)
                threading.Thread(target=_send, args=(request, pending.future), name="hub-request", daemon=True).start()
            pending.last_s = now
        wait([pending.future], _PATIENCE_S)
        if not pending.future.done():
            return None
        with self._lock:
            if self._pending.get(request) is pending:  # else another thread that waited for it has removed it
                del self._pending[request]
        return pending.future.result()

    def _drop_abandoned(self, now: float) -> None:
        """Drops answers that TensorStore no longer asks for."""
        for request, pending in list(self._pending.items()):
            if pending.future.done() and now - pending.last_s > _KEPT_S:
                del self._pending[request]

    def with_hub_addresses(self, message: str) -> str:
        """A message from TensorStore, with this server's addresses replaced by those on the Hub."""
        return re.sub(rf"{self._url}/(\d+)", lambda match: self._mounted[int(match[1])].url, message)


def _bypass_proxy() -> None:
    """Excludes this server from the proxy set in the environment."""
    exceptions = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    if exceptions != "*" and _HOST not in exceptions.split(","):
        os.environ["no_proxy"] = ",".join(filter(None, [exceptions, _HOST]))


def _send(request: Request, future: "Future[HubAnswer]") -> None:
    files, key, byte_range = request
    try:
        future.set_result(files.get(key, byte_range))
    except Exception as error:  # raised in the thread that waits
        future.set_exception(error)


_starting = threading.Lock()


def hub_relay() -> HubRelay:
    """The relay of this process; the first call starts it."""
    with _starting:
        return _relay()


@cache
def _relay() -> HubRelay:
    return HubRelay()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # a reader opens more than a hundred connections at once


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # buffered, so that header and body are sent in one packet
    disable_nagle_algorithm = True

    def __init__(self, relay: HubRelay, *args: Any) -> None:
        self._relay = relay
        super().__init__(*args)

    def handle(self) -> None:
        with suppress(ConnectionError):  # the reader closed the connection
            super().handle()

    def do_GET(self) -> None:
        authorization = self.headers.get("Authorization", "").encode()  # bytes, since compare_digest takes only ASCII
        if not secrets.compare_digest(authorization, self._relay.password.encode()):
            self._answer(_REFUSED, b"not this process's relay")
            return
        files, key = self._relay.find(unquote(urlsplit(self.path).path))
        try:
            answer = self._relay.answer((files, key, self.headers.get("Range")))
        except (PipelineError, httpx.HTTPError) as error:
            cause = str(error).partition(". ")[0]  # TensorStore's message contains the start of it
            self._answer(_REFUSED if isinstance(error, StoreInvalid) else _FAILED, cause.encode())
            return
        if answer is None:
            self._answer(_LATER, b"the Hub has not answered yet")
            return
        self._answer(*answer)

    def _answer(self, status: int, content: bytes, content_range: str | None = None) -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(content)))
        if content_range is not None:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        pass
