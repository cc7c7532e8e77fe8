"""An HTTP proxy before an object store's emulator: it counts requests, and damages some of them as networks do."""

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


class Fault(StrEnum):
    too_many_requests = "429"
    unavailable = "503"
    hang = "hang"  # the request is not answered
    refused = "cut before"  # the connection ends before the server has the request
    unanswered = "cut after"  # the server has carried out the request, and its answer is lost
    short = "short body"  # the connection ends in the middle of the answer


class FaultProxy:
    """Forwards to `backend` (host:port). Each request meets a fault with probability `rate`, drawn with `seed`.

    `requests` counts what arrived and `served` what the backend answered in full, by method and object; `faults` what
    was done to them.
    """

    def __init__(self, backend: str, rate: float = 0.0, seed: int = 0, hang_s: float = 30.0) -> None:
        self.backend = backend
        self.rate = rate
        self.hang_s = hang_s
        self.kinds = list(Fault)
        self.requests: Counter[tuple[str, str]] = Counter()
        self.served: Counter[tuple[str, str]] = Counter()
        self.faults: Counter[Fault] = Counter()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: _Handler(self, *args))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Iterator["FaultProxy"]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def clear(self) -> None:
        with self._lock:
            for counter in (self.requests, self.served, self.faults):
                counter.clear()

    def arrived(self, what: tuple[str, str]) -> Fault | None:
        """Counts a request and decides what happens to it."""
        with self._lock:
            self.requests[what] += 1
            if self._random.random() >= self.rate:
                return None
            fault = self._random.choice(self.kinds)
            self.faults[fault] += 1
            return fault

    def answered(self, what: tuple[str, str]) -> None:
        with self._lock:
            self.served[what] += 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, proxy: FaultProxy, *args: object) -> None:
        self._proxy = proxy
        super().__init__(*args)

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client that gave up
            super().handle()

    def _serve(self) -> None:
        body = self._body()
        what = (self.command, object_key(self.path))
        fault = self._proxy.arrived(what)
        if fault in (Fault.too_many_requests, Fault.unavailable):
            self._answer(int(fault), [], b"")
        elif fault is Fault.hang:
            time.sleep(self._proxy.hang_s)
            self._cut()
        elif fault is Fault.refused:
            self._cut()
        else:
            response, content = self._forward(body)
            if fault is Fault.unanswered:
                self._cut()
            elif fault is Fault.short and content:
                self._answer(response.status, response.getheaders(), content[: len(content) // 2], len(content))
                self._cut()
            else:
                self._proxy.answered(what)
                self._answer(response.status, response.getheaders(), content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _serve

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _forward(self, body: bytes) -> tuple[HTTPResponse, bytes]:
        connection = HTTPConnection(self._proxy.backend, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("transfer-encoding", "connection")}
        headers["Content-Length"] = str(len(body))
        connection.request(self.command, self.path, body, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response, content

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, length: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("connection", "content-length", "transfer-encoding"):
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)

    def _cut(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *args: object) -> None:
        pass


def object_key(target: str) -> str:
    """The object that a request of the GCS JSON API or of S3 (path style) is about, or the prefix that it lists."""
    url = urlsplit(target)
    query = {name: values[0] for name, values in parse_qs(url.query).items()}
    for name in ("name", "prefix"):  # a GCS upload; a listing
        if name in query:
            return query[name] + ("*" if name == "prefix" else "")
    _, found, key = url.path.partition("/o/")
    return unquote(key if found else url.path.lstrip("/").partition("/")[2])
