"""A server of Google Cloud Storage's JSON API for benchmarks and tests: objects in memory, costs like a real bucket's.

    python -m scripts.bench.gcs_standin --port 9000 [--latency-s 0.05]

Every request takes `latency_s`, by a timer, so any number of them can wait at the same time. The server checks
conditions on generations, lists pages of 1,000 objects, and answers 429 to requests beyond a rate or during an outage.
It counts requests by kind, and can record when each arrived. It implements the part of the API that TensorStore's `gcs`
driver and gcsfs use: set TENSORSTORE_GCS_HTTP_URL and STORAGE_EMULATOR_HOST to its URL. Objects that are computed on
request (`Provider`) make large stores cheap.
"""

import argparse
import asyncio
import base64
import bisect
import heapq
import itertools
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote
from urllib.request import Request, urlopen

from aiohttp import web

PAGE_KEYS = 1000
_LARGE = 1 << 20  # bytes
CONTROL = "/control"
_OBJECT = re.compile(r"(?:/download|/upload)?/storage/v1/b/([^/]+)/o(?:/(.+))?")
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_PROVIDED_GENERATION = 1


_SAME_METADATA = {
    "contentType": "application/octet-stream",
    "storageClass": "STANDARD",
    "md5Hash": "1B2M2Y8AsgTpgAmY7PhCfg==",
    "crc32c": "AAAAAA==",
    "etag": "CICAgICAgICAgICAgA==",
    "timeCreated": "2025-01-01T00:00:00.000Z",
    "updated": "2025-01-01T00:00:00.000Z",
    "timeStorageClassUpdated": "2025-01-01T00:00:00.000Z",
    "timeFinalized": "2025-01-01T00:00:00.000Z",
}


class Provider(Protocol):
    """Objects that exist from the start and are computed on request. Keys are `bucket/name`."""

    def content(self, key: str) -> bytes | None:
        """The object's bytes; None if it does not exist."""

    def keys_from(self, start: str) -> Iterator[str]:
        """The keys from `start`, ascending."""


@dataclass(frozen=True)
class Behaviour:
    """How the server treats requests.

    latency_s: of every request. bytes_per_s: speed of a request's or an answer's body. requests_per_s: limit for all
    clients together; the server answers 429 to more. refuse_s: it answers 429 to every request for this many seconds.
    log_arrivals: record when requests arrive.
    """

    latency_s: float = 0.05
    bytes_per_s: float | None = None
    requests_per_s: float | None = None
    refuse_s: float = 0.0
    log_arrivals: bool = False


class Objects:
    """The objects by key, `bucket/name`: written ones, and a provider's, except for deleted ones."""

    def __init__(self, provider: Provider | None = None) -> None:
        self._provider = provider
        self._written: dict[str, tuple[bytes, int]] = {}
        self._sorted: list[str] = []  # keys of written objects
        self._hidden: set[str] = set()  # deleted keys of the provider
        self._large: dict[bytes, bytes] = {}  # kept once, since benchmarks write the same activations repeatedly
        self._generations = itertools.count(_PROVIDED_GENERATION + 1)

    def get(self, key: str) -> tuple[bytes, int] | None:
        """The object's content and generation; None if it does not exist."""
        written = self._written.get(key)
        if written is not None or self._provider is None or key in self._hidden:
            return written
        content = self._provider.content(key)
        return None if content is None else (content, _PROVIDED_GENERATION)

    def put(self, key: str, content: bytes) -> int:
        """Writes an object. Returns the new generation."""
        if key not in self._written:
            bisect.insort(self._sorted, key)
        generation = next(self._generations)
        if len(content) >= _LARGE:
            content = self._large.setdefault(content, content)
        self._written[key] = (content, generation)
        return generation

    def delete(self, key: str) -> None:
        if self._written.pop(key, None) is not None:
            del self._sorted[bisect.bisect_left(self._sorted, key)]
        if self._provider is not None:
            self._hidden.add(key)

    def size(self, key: str) -> int | None:
        """The object's size; None for a provider's object, which would have to be computed."""
        written = self._written.get(key)
        return None if written is None else len(written[0])

    def keys_from(self, start: str) -> Iterator[str]:
        """The keys from `start`, ascending."""
        written = itertools.islice(self._sorted, bisect.bisect_left(self._sorted, start), None)
        if self._provider is None:
            yield from written
            return
        provided = (key for key in self._provider.keys_from(start) if key not in self._hidden)
        yield from (key for key, _ in itertools.groupby(heapq.merge(written, provided)))


class StandIn:
    """The server's state: objects, behaviour, and counters of requests since the last reset."""

    def __init__(self, behaviour: Behaviour, provider: Provider | None = None) -> None:
        self.objects = Objects(provider)
        self.set_behaviour(behaviour)

    def set_behaviour(self, behaviour: Behaviour) -> None:
        """Sets the behaviour, and resets the counters."""
        self.behaviour = behaviour
        self.counters: Counter[str] = Counter()
        self.arrivals: list[float] = []
        self._refuse_until = time.monotonic() + behaviour.refuse_s
        self._allowance, self._allowed_at = 1.0, time.monotonic()

    def admits(self) -> bool:
        """Whether a request is executed if it arrives now, given the rate and outages."""
        now, rate = time.monotonic(), self.behaviour.requests_per_s
        if self.behaviour.log_arrivals:
            self.arrivals.append(now)
        if now < self._refuse_until:
            return False
        if rate is None:
            return True
        self._allowance = min(max(1.0, rate / 10), self._allowance + (now - self._allowed_at) * rate)
        self._allowed_at = now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True

    async def handle(self, request: web.BaseRequest) -> web.Response:
        path, _, query_text = request.raw_path.partition("?")
        body = await request.content.read()
        if path == CONTROL:
            return self._control(body)
        query = dict(parse_qsl(query_text, keep_blank_values=True))
        matched = _OBJECT.fullmatch(path)
        if matched is None:
            return _json({"error": {"code": 404, "message": f"no such path: {path}"}}, 404)
        bucket, name = matched[1], unquote(matched[2] or "")
        kind = _kind(request.method, name)
        is_admitted = self.admits()
        self.counters[kind] += 1
        if self.behaviour.latency_s:
            await asyncio.sleep(self.behaviour.latency_s)
        if not is_admitted:
            self.counters["refused"] += 1
            return _json({"error": {"code": 429, "message": "rate limit"}}, 429)
        response = self._answer(kind, bucket, name, query, request, body)
        num_bytes = len(body) + (response.content_length or 0)
        self.counters["bytes"] += num_bytes
        if self.behaviour.bytes_per_s:
            await asyncio.sleep(num_bytes / self.behaviour.bytes_per_s)
        return response

    def _answer(
        self, kind: str, bucket: str, name: str, query: Mapping[str, str], request: web.BaseRequest, body: bytes
    ) -> web.Response:
        if kind == "list":
            return _json(self._page(bucket, query))
        if kind == "put":
            name, content = _uploaded(query, request.headers.get("Content-Type", ""), body)
            if failed := self._failed_condition(f"{bucket}/{name}", query):
                return failed
            return _json(_resource(bucket, name, len(content), self.objects.put(f"{bucket}/{name}", content)))
        key = f"{bucket}/{name}"
        stored = self.objects.get(key)
        if failed := self._failed_condition(key, query):
            return failed
        if stored is None:
            return _json({"error": {"code": 404, "message": f"no such object: {key}"}}, 404)
        content, generation = stored
        if kind == "delete":
            self.objects.delete(key)
            return web.Response(status=204)
        if query.get("ifGenerationNotMatch") == str(generation):
            return web.Response(status=304)
        if query.get("alt") != "media":
            return _json(_resource(bucket, name, len(content), generation))
        return _content(content, request.headers.get("Range"), generation)

    def _failed_condition(self, key: str, query: Mapping[str, str]) -> web.Response | None:
        wanted = query.get("ifGenerationMatch")
        if wanted is None:
            return None
        stored = self.objects.get(key)
        if wanted == str(0 if stored is None else stored[1]):
            return None
        self.counters["conditions failed"] += 1
        return _json({"error": {"code": 412, "message": f"{key} does not have generation {wanted}"}}, 412)

    def _page(self, bucket: str, query: Mapping[str, str]) -> dict[str, Any]:
        """One page of a listing: at most PAGE_KEYS objects and common prefixes, and the start of the next page."""
        prefix, delimiter, end = query.get("prefix", ""), query.get("delimiter"), query.get("endOffset")
        limit = min(int(query.get("maxResults", PAGE_KEYS)), PAGE_KEYS)
        token = query.get("pageToken")
        start = max(prefix, query.get("startOffset", "") if token is None else _decode_token(token))
        items, prefixes = [], []
        root = f"{bucket}/"
        keys = self.objects.keys_from(root + start)
        while (key := next(keys, None)) is not None:
            name = key.removeprefix(root)
            if not key.startswith(root + prefix) or (end and name >= end):
                break
            if len(items) + len(prefixes) == limit:
                return {**_listed(items, prefixes), "nextPageToken": _encode_token(name)}
            rest, is_below, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if is_below:
                prefixes.append(prefix + rest + delimiter)
                keys = self.objects.keys_from(root + prefix + rest + chr(ord(delimiter) + 1))
            else:
                items.append(_resource(bucket, name, self.objects.size(key), None))
        return _listed(items, prefixes)

    def _control(self, body: bytes) -> web.Response:
        report = {"counters": dict(self.counters), "arrivals": self.arrivals}
        if body:
            self.set_behaviour(replace(self.behaviour, **json.loads(body)))
        return _json(report)


def _kind(method: str, name: str) -> str:
    if method == "GET":
        return "get" if name else "list"
    return "delete" if method == "DELETE" else "put"


def _uploaded(query: Mapping[str, str], content_type: str, body: bytes) -> tuple[str, bytes]:
    """Name and content of an uploaded object. Raises ValueError for a kind of upload that is not implemented."""
    if query.get("uploadType") == "media":
        return query["name"], body
    if query.get("uploadType") != "multipart":
        raise ValueError(f"uploadType={query.get('uploadType')}: expected media or multipart")
    boundary = content_type.partition("boundary=")[2].strip("\"'").encode()
    _, described, content = body.split(b"--" + boundary)[:3]
    name = json.loads(_part(described))["name"]
    return name, _part(content)


def _part(part: bytes) -> bytes:
    """The content of one part of a multipart body."""
    newline = b"\r\n" if part.startswith(b"\r\n") else b"\n"
    content = part.partition(newline * 2)[2]
    return content[: -len(newline)]


def _content(content: bytes, wanted: str | None, generation: int) -> web.Response:
    headers = {"x-goog-generation": str(generation), "Content-Type": "application/octet-stream"}
    matched = _RANGE.fullmatch(wanted or "")
    if matched is None:
        return web.Response(body=content, headers=headers)
    first, last = matched.groups()
    start = int(first) if first else max(0, len(content) - int(last))
    stop = min(int(last) + 1, len(content)) if first and last else len(content)
    if start >= len(content):
        return web.Response(status=416)
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
    return web.Response(status=206, body=content[start:stop], headers=headers)


def _resource(bucket: str, name: str, size: int | None, generation: int | None) -> dict[str, Any]:
    """An object's metadata, with as many fields as in the real service, where a page has about 0.8 MB."""
    resource = {
        "kind": "storage#object",
        "id": f"{bucket}/{name}/1700000000000000",
        "selfLink": f"https://www.googleapis.com/storage/v1/b/{bucket}/o/{name}",
        "mediaLink": f"https://storage.googleapis.com/download/storage/v1/b/{bucket}/o/{name}?generation=1&alt=media",
        "bucket": bucket,
        "name": name,
        **_SAME_METADATA,
    }
    if size is not None:
        resource["size"] = str(size)
    if generation is not None:
        resource |= {"generation": str(generation), "metageneration": "1"}
    return resource


def _listed(items: list[dict[str, Any]], prefixes: list[str]) -> dict[str, Any]:
    return {"kind": "storage#objects", "items": items, "prefixes": prefixes}


def _encode_token(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode()


def _decode_token(token: str) -> str:
    return base64.urlsafe_b64decode(token).decode()


def _json(content: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=json.dumps(content).encode(), content_type="application/json")


async def _start(stand_in: StandIn, port: int) -> tuple[web.ServerRunner, str]:
    runner = web.ServerRunner(web.Server(stand_in.handle, access_log=None))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, backlog=4096)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


@contextmanager
def serving(stand_in: StandIn) -> Iterator[str]:
    """Runs the server in a thread of this process. Yields its URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="gcs-stand-in")
    thread.start()
    try:
        runner, url = asyncio.run_coroutine_threadsafe(_start(stand_in, 0), loop).result()
        yield url
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def server(provider: Provider | None = None) -> Iterator[str]:
    """Runs the server in a separate process, initially without latency. Yields its URL."""
    context = get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_serve_process, args=(provider, sending), daemon=True)
    process.start()
    try:
        yield receiving.recv()
    finally:
        process.kill()
        process.join()


def _serve_process(provider: Provider | None, ready: Connection) -> None:
    """The main function of a server process, which ends with its parent. Sends its URL through `ready`."""

    async def serve() -> None:
        _, url = await _start(StandIn(Behaviour(latency_s=0), provider), 0)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(parent_process().sentinel, ended.set)
        ready.send(url)
        await ended.wait()

    asyncio.run(serve())


def control(url: str, **behaviour: Any) -> dict[str, Any]:
    """The counters (and arrivals, in seconds) since the behaviour last changed. Sets `behaviour` if given."""
    unknown = behaviour.keys() - {field.name for field in fields(Behaviour)}
    if unknown:
        raise ValueError(f"the stand-in has no {sorted(unknown)}")
    body = json.dumps(behaviour).encode() if behaviour else None
    with urlopen(Request(url + CONTROL, body, method="POST" if body else "GET"), timeout=60) as answer:
        return json.load(answer)


def environment(url: str) -> dict[str, str]:
    """Environment variables that make TensorStore and gcsfs use the server. TensorStore reads its variable once per
    process."""
    return {
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        "STORAGE_EMULATOR_HOST": url,
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "FSSPEC_GCS_TOKEN": "anon",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=9000)
    for name, default in asdict(Behaviour()).items():
        if name != "log_arrivals":
            parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=default)
    options = vars(parser.parse_args())
    port = options.pop("port")

    async def serve() -> None:
        _, url = await _start(StandIn(Behaviour(**options)), port)
        print(" ".join(f"{name}={value}" for name, value in environment(url).items()), flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
