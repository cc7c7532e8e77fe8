"""An HTTP proxy in front of an object store's emulator. It counts requests, and disturbs some as networks do.

The emulator of Google Cloud Storage ignores generations: the proxy keeps them, and checks conditions on them.
"""

import json
import random
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from enum import StrEnum
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from urllib.parse import parse_qs, unquote, urlsplit

from tests.jobs import served


class Fault(StrEnum):
    too_many_requests = "429"
    unavailable = "503"
    hang = "hang"  # the request is not answered
    refused = "cut before"  # the connection closes before the server has the request
    unanswered = "cut after"  # the server has carried out the request, but its response is lost
    short = "short body"  # the connection closes in the middle of the response
    # Wrong responses that only a client who knows the object can detect. Only for requests that read an object.
    missing = "404"
    truncated = "truncated body"
    corrupted = "corrupted body"


CONTENT_FAULTS = (Fault.missing, Fault.truncated, Fault.corrupted)
NETWORK_FAULTS = tuple(fault for fault in Fault if fault not in CONTENT_FAULTS)


# The emulators answer one request at a time, and connections beyond a short queue wait for a second or more.
BACKEND_REQUESTS = 4


class FaultProxy:
    """Forwards to `backend` (host:port). Each request gets a fault with the probability given to `reset`.

    `requests` counts requests by method and object, `faults` the faults. A request that hangs does so for `hang_s`
    seconds, or until its client gives up; then the connection closes.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.turn = threading.Semaphore(BACKEND_REQUESTS)
        self.conditional = threading.RLock()  # held from the check of a condition to the write
        self.generations: dict[str, str] = {}  # of GCS objects, by bucket and key
        self._lock = threading.Lock()
        self.reset()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: _Handler(self, *args))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Iterator["FaultProxy"]:
        with served(self._server):
            yield self

    def reset(
        self,
        rate: float = 0.0,
        seed: int = 0,
        kinds: Sequence[Fault] = NETWORK_FAULTS,
        hang_s: float = 0.3,
        missing: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Sets the faults and resets the counters. `missing`: by object, how many of its first reads get 404."""
        with self._lock:
            self._missing = missing
            self.hang_s = hang_s
            self._rate, self._random, self._kinds = rate, random.Random(seed), kinds
            self.requests: Counter[tuple[str, str]] = Counter()
            self.faults: Counter[Fault] = Counter()

    def arrived(self, what: tuple[str, str]) -> Fault | None:
        """Counts a request and decides what happens to it."""
        with self._lock:
            self.requests[what] += 1
            if what[0] == "GET" and self.requests[what] <= self._missing.get(what[1], 0):
                self.faults[Fault.missing] += 1
                return Fault.missing
            if self._random.random() >= self._rate:
                return None
            fault = self._random.choice(self._kinds)
            self.faults[fault] += 1
            return fault


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # header and body in one packet

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
        if fault in CONTENT_FAULTS:
            self._serve_wrongly(fault, body, reads_object=self.command == "GET" and not what[1].endswith("*"))
        elif fault in (Fault.too_many_requests, Fault.unavailable):
            self._answer(int(fault), [], b"")
        elif fault is Fault.hang:
            self.connection.settimeout(self._proxy.hang_s)
            with suppress(TimeoutError):
                self.rfile.peek(1)  # returns when the client closes the connection
            self._cut()
        elif fault is Fault.refused:
            self._cut()
        else:
            with self._proxy.conditional if self.command in ("POST", "DELETE") else nullcontext():
                if not self._condition_holds():
                    self._answer(412, [], b"")
                    return
                response, content, generation = self._forward_unchanged(body)
                headers = [*response.getheaders(), *self._note_generation(response, content, generation)]
            if fault is Fault.unanswered or (fault is Fault.short and not content):
                self._cut()
            elif fault is Fault.short:
                self._answer(response.status, headers, content[: len(content) // 2], len(content))
                self._cut()
            else:
                self._answer(response.status, headers, content)

    def _serve_wrongly(self, fault: Fault, body: bytes, reads_object: bool) -> None:
        response, content = self._forward(body)
        status = response.status
        if reads_object and status in (200, 206) and content:
            if fault is Fault.missing:
                status, content = 404, b""
            elif fault is Fault.truncated:
                content = content[: len(content) // 2]
            else:
                middle = len(content) // 2
                content = content[:middle] + bytes([content[middle] ^ 0x55]) + content[middle + 1 :]
        self._answer(status, response.getheaders(), content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _serve

    def _condition_holds(self) -> bool:
        wanted = parse_qs(urlsplit(self.path).query).get("ifGenerationMatch")
        return wanted is None or wanted == [self._proxy.generations.get(_gcs_object(self.path), "0")]

    def _note_generation(self, response: HTTPResponse, content: bytes, generation: str | None) -> list[tuple[str, str]]:
        """Records the generation that an upload gives an object. Returns the header of a download with its own."""
        place, generations = _gcs_object(self.path), self._proxy.generations
        if place is None or response.status >= 300:
            return []
        if self.command == "DELETE":
            generations.pop(place, None)
        elif self.command == "POST" and "generation" in (uploaded := json.loads(content or b"{}")):
            generations[place] = str(uploaded["generation"])
        elif self.command == "GET" and generation is not None:
            return [("x-goog-generation", generation)]
        return []

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _forward_unchanged(self, body: bytes) -> tuple[HTTPResponse, bytes, str | None]:
        """Reads again what was written while it was read: old content must not get the new generation. Returns the
        generation, too."""
        place, generations = _gcs_object(self.path), self._proxy.generations
        while True:
            before = generations.get(place)
            response, content = self._forward(body)
            with self._proxy.conditional:  # until an upload that was read has noted its generation
                if self.command != "GET" or generations.get(place) == before:
                    return response, content, before

    def _forward(self, body: bytes) -> tuple[HTTPResponse, bytes]:
        replaced = ("transfer-encoding", "connection", "content-length")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in replaced}
        headers["Content-Length"] = str(len(body))
        with self._proxy.turn, closing(HTTPConnection(self._proxy.backend, timeout=60)) as connection:
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            content = response.read()
        suffix = re.fullmatch(r"bytes=-(\d+)", self.headers.get("Range", ""))
        if suffix and response.status == 200:  # the GCS emulator ignores such ranges, which the service supports
            first = max(0, len(content) - int(suffix[1]))
            response.status, response.headers["Content-Range"] = 206, f"bytes {first}-{len(content) - 1}/{len(content)}"
            content = content[first:]
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
        self.wfile.flush()

    def _cut(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *args: object) -> None:
        pass


def object_key(target: str) -> str:
    """The object that a request of the GCS JSON API or of S3 (path style) names, or PREFIX* for a listing."""
    url = urlsplit(target)
    query = {name: values[0] for name, values in parse_qs(url.query).items()}
    if "name" in query:  # an upload to GCS
        return query["name"]
    for name in ("prefix", "startOffset"):
        if name in query:
            return query[name] + "*"
    _, found, key = url.path.partition("/o/")
    return unquote(key if found else url.path.lstrip("/").partition("/")[2])


def _gcs_object(target: str) -> str | None:
    """The bucket and key that a request of the GCS JSON API names; None for other requests."""
    url = urlsplit(target)
    path, is_object, key = url.path.partition("/o/")
    key = unquote(key) if is_object else "".join(parse_qs(url.query).get("name", []))
    bucket = path.partition("/b/")[2].removesuffix("/o")
    return f"{bucket}/{key}" if bucket and key else None
