"""A server of Google Cloud Storage's JSON API for benchmarks: objects in memory, costs like a real bucket's.

Every request takes `latency_s`, by a timer, so any number of them can wait at the same time. The server checks
conditions on generations, lists pages of 1,000 objects, and counts requests by kind. It implements the part of the API
that TensorStore's `gcs` driver uses.
"""

import asyncio
import bisect
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import parse_qsl, unquote
from urllib.request import urlopen

from aiohttp import web

PAGE_KEYS = 1000
CONTROL = "/control"
_OBJECT = re.compile(r"(?:/download|/upload)?/storage/v1/b/([^/]+)/o(?:/(.+))?")
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class Objects:
    """The objects by key, `bucket/name`: content and generation."""

    def __init__(self) -> None:
        self.stored: dict[str, tuple[bytes, int]] = {}
        self._sorted: list[str] = []
        self._generations = itertools.count(1)

    def put(self, key: str, content: bytes) -> int:
        """Writes an object. Returns the new generation."""
        if key not in self.stored:
            bisect.insort(self._sorted, key)
        self.stored[key] = content, next(self._generations)
        return self.stored[key][1]

    def delete(self, key: str) -> None:
        if self.stored.pop(key, None) is not None:
            del self._sorted[bisect.bisect_left(self._sorted, key)]

    def keys_from(self, start: str) -> Iterator[str]:
        """The keys from `start`, ascending."""
        return itertools.islice(self._sorted, bisect.bisect_left(self._sorted, start), None)


class StandIn:
    """The server's state: objects, latency, and the requests by kind since the latency was last set."""

    def __init__(self) -> None:
        self.objects, self.latency_s = Objects(), 0.0
        self.counters: Counter[str] = Counter()

    async def handle(self, request: web.BaseRequest) -> web.Response:
        path, _, query_text = request.raw_path.partition("?")
        body = await request.content.read()
        if path == CONTROL:
            counted, self.counters, self.latency_s = self.counters, Counter(), float(body)
            return _json(counted)
        query = dict(parse_qsl(query_text, keep_blank_values=True))
        matched = _OBJECT.fullmatch(path)
        if matched is None:
            return _json({"error": {"code": 404, "message": f"no such path: {path}"}}, 404)
        bucket, name = matched[1], unquote(matched[2] or "")
        kind = {"GET": "get" if name else "list", "DELETE": "delete"}.get(request.method, "put")
        self.counters[kind] += 1
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        if kind == "list":
            return _json(self._page(bucket, query))
        return self._answer(kind, bucket, query["name"] if kind == "put" else name, query, request, body)

    def _answer(
        self, kind: str, bucket: str, name: str, query: Mapping[str, str], request: web.BaseRequest, body: bytes
    ) -> web.Response:
        key = f"{bucket}/{name}"
        stored = self.objects.stored.get(key)
        if query.get("ifGenerationMatch") not in (None, str(0 if stored is None else stored[1])):
            return _json({"error": {"code": 412, "message": f"{key} does not have this generation"}}, 412)
        if kind == "put":
            return _json(_resource(bucket, name, len(body), self.objects.put(key, body)))
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

    def _page(self, bucket: str, query: Mapping[str, str]) -> dict[str, Any]:
        """One page of a listing: at most PAGE_KEYS objects and common prefixes, and the start of the next page."""
        prefix, delimiter, end = query.get("prefix", ""), query.get("delimiter"), query.get("endOffset")
        limit = min(int(query.get("maxResults", PAGE_KEYS)), PAGE_KEYS)
        start = max(prefix, query.get("pageToken", query.get("startOffset", "")))
        items, prefixes = [], []
        root = f"{bucket}/"
        keys = self.objects.keys_from(root + start)
        while (key := next(keys, None)) is not None:
            name = key.removeprefix(root)
            if not key.startswith(root + prefix) or (end and name >= end):
                break
            if len(items) + len(prefixes) == limit:
                return {"items": items, "prefixes": prefixes, "nextPageToken": name}
            rest, is_below, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if is_below:
                prefixes.append(prefix + rest + delimiter)
                keys = self.objects.keys_from(root + prefix + rest + chr(ord(delimiter) + 1))
            else:
                content, generation = self.objects.stored[key]
                items.append(_resource(bucket, name, len(content), generation))
        return {"items": items, "prefixes": prefixes}


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


def _resource(bucket: str, name: str, size: int, generation: int) -> dict[str, Any]:
    """An object's metadata."""
    metadata = {"kind": "storage#object", "bucket": bucket, "name": name, "contentType": "application/octet-stream"}
    return metadata | {"size": str(size), "generation": str(generation), "metageneration": "1"}


def _json(content: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=json.dumps(content).encode(), content_type="application/json")


@contextmanager
def server() -> Iterator[str]:
    """Runs the server in a separate process, initially without latency. Yields its URL."""
    context = get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_serve_process, args=(sending,), daemon=True)
    process.start()
    try:
        yield receiving.recv()
    finally:
        process.kill()
        process.join()


def _serve_process(ready: Connection) -> None:
    """The main function of a server process, which ends with its parent. Sends its URL through `ready`."""

    async def serve() -> None:
        runner = web.ServerRunner(web.Server(StandIn().handle, access_log=None))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(parent_process().sentinel, ended.set)
        ready.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await ended.wait()

    asyncio.run(serve())


def control(url: str, latency_s: float) -> dict[str, int]:
    """Sets the latency of every request. Returns the requests by kind since it was last set."""
    with urlopen(url + CONTROL, str(latency_s).encode(), timeout=60) as answer:
        return json.load(answer)


def environment(url: str) -> dict[str, str]:
    """Environment variables that make TensorStore use the server. It reads them once per process."""
    return {"TENSORSTORE_GCS_HTTP_URL": url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token"}
