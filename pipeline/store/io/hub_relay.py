"""Lets TensorStore read from the Hugging Face Hub: a server on this machine's loopback, for this process alone.

TensorStore reads http, but does not follow redirects, with which the Hub answers requests for large files. So it asks
this server, which asks the Hub (`HubFiles`) and repeats what fails. An answer is passed on when it is whole.

The Hub may have us wait for minutes, and TensorStore gives a server up that sends nothing for one. So it is asked to
come back, and then finds the request that it made before.
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

# HTTP statuses. TensorStore does not repeat a request that ends with one of the first two: it has been repeated here.
_REFUSED, _FAILED, _LATER = 403, 424, 503
_PATIENCE_S = 30.0
_KEPT_S = 300.0  # an answer since it was last asked for; TensorStore comes back within a minute
_HOST = "127.0.0.1"

Request = tuple[HubFiles, str, str | None]  # a key, and the range of its bytes


@dataclass
class _Asked:
    """A request to the Hub. last_s: when it was last asked for, by the monotonic clock."""

    future: Future[HubAnswer]
    last_s: float


class HubRelay:
    """The server of this process. Use `hub_relay`."""

    def __init__(self) -> None:
        self.password = f"Bearer {secrets.token_urlsafe()}"  # other users of the machine may not read private stores
        self._mounted: list[HubFiles] = []
        self._under_way: dict[Request, _Asked] = {}
        self._lock = threading.Lock()
        server = _Server((_HOST, 0), lambda *args: _Handler(self, *args))
        self._url = f"http://{_HOST}:{server.server_port}"
        threading.Thread(target=server.serve_forever, name="hub-relay", daemon=True).start()

    def spec(self, path: str) -> dict[str, Any]:
        """TensorStore's spec of the key-value store with the files of a path on the Hub; see `open_hub_files`."""
        files = open_hub_files(path)
        with self._lock:
            if files not in self._mounted:
                self._mounted.append(files)
            number = self._mounted.index(files)
        _call_directly()
        headers = [f"Authorization: {self.password}"]
        return {"driver": "http", "base_url": self._url, "path": f"/{number}/", "headers": headers}

    def find(self, path: str) -> tuple[HubFiles, str]:
        """The files that a path of this server, or of a key-value store's spec, belongs to, and the key in them."""
        _, number, key = path.split("/", 2)
        return self._mounted[int(number)], key

    def answer(self, request: Request) -> HubAnswer | None:
        """The Hub's answer, or None where it takes longer than TensorStore would wait: ask again. Raises as
        `HubFiles.get` does."""
        now = time.monotonic()
        with self._lock:
            self._drop_abandoned(now)
            asked = self._under_way.get(request)
            if asked is None:
                asked = self._under_way[request] = _Asked(Future(), now)
                threading.Thread(target=_ask, args=(request, asked.future), name="hub-request", daemon=True).start()
            asked.last_s = now
        wait([asked.future], _PATIENCE_S)
        if not asked.future.done():
            return None
        with self._lock:
            if self._under_way.get(request) is asked:  # of several that wait, the first one
                del self._under_way[request]
        return asked.future.result()

    def _drop_abandoned(self, now: float) -> None:
        """Drops answers that nobody has come back for."""
        for request, asked in list(self._under_way.items()):
            if asked.future.done() and now - asked.last_s > _KEPT_S:
                del self._under_way[request]

    def named(self, message: str) -> str:
        """A message of TensorStore's, with the addresses that this server stands for."""
        return re.sub(rf"{self._url}/(\d+)", lambda match: self._mounted[int(match[1])].url, message)


def _call_directly() -> None:
    """TensorStore's requests to this server must not go through the proxy that the environment names."""
    exceptions = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    if exceptions != "*" and _HOST not in exceptions.split(","):
        os.environ["no_proxy"] = ",".join(filter(None, [exceptions, _HOST]))


def _ask(request: Request, asked: "Future[HubAnswer]") -> None:
    files, key, byte_range = request
    try:
        asked.set_result(files.get(key, byte_range))
    except Exception as error:  # is raised where the answer is waited for
        asked.set_exception(error)


_starting = threading.Lock()


def hub_relay() -> HubRelay:
    """The relay of this process, which is started with the first call."""
    with _starting:
        return _relay()


@cache
def _relay() -> HubRelay:
    return HubRelay()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # a reader connects more than a hundred times at once


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # header and body in one packet
    disable_nagle_algorithm = True

    def __init__(self, relay: HubRelay, *args: Any) -> None:
        self._relay = relay
        super().__init__(*args)

    def handle(self) -> None:
        with suppress(ConnectionError):  # a reader that was dropped, or ends
            super().handle()

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "").encode()  # it may be more than ASCII
        if not secrets.compare_digest(given, self._relay.password.encode()):
            self._answer(_REFUSED, b"not this process's relay")
            return
        files, key = self._relay.find(unquote(urlsplit(self.path).path))
        try:
            answer = self._relay.answer((files, key, self.headers.get("Range")))
        except (PipelineError, httpx.HTTPError) as error:
            cause = str(error).partition(". ")[0]  # TensorStore's message has some of it
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
