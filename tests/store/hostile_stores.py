"""Stores crafted to crash a reader, fill its memory or lead it out of the store. Their checksums are valid.

`cases` edit a sound store. A pool of processes opens each edited store, reads all of it and verifies it. Only
PipelineErrors may be raised, and no case may take much more memory than the sound store.
"""

import functools
import io
import json
import os
import resource
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.errors import PipelineError
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.metadata import StoreMetadata
from pipeline.store.generated import documents as group_files
from pipeline.store.generated.documents import group_key
from pipeline.store.io.parsing import json_digest
from pipeline.store.io.shards import ABSENT, checksum
from tests.store.damage_fuzzer import describe, read_content
from tests.store.example_store import full_image, write_image

MAX_MIB = 200  # above what the process held before
_LIMIT_GIB = 3  # of more address space, so that a huge allocation fails
_RECORD = "_commits/stream-00000/block-000000.json"
_TABLE = "_documents/stream-00000/block-000000.parquet"
_STATISTICS = "_statistics/stream-00000/block-000000.parquet"
_HUGE = (-1, 0, 1 << 31, (1 << 32) - 1, 1 << 62, 10**30)
_WRONG = (None, True, 1.5, float("nan"), "x", "\ud800", [], {}, [[]], {"a": {}})
_DEEP = "[" * 100_000 + "]" * 100_000
_BOMB = 1 << 29  # bytes


class Case(NamedTuple):
    name: str  # its class, and which one
    edit: Callable[[Path], object]  # of a store in this folder
    kind: str = "int8"  # of the sound store


def seal_root(text: str) -> str:
    """The root with its fingerprint and checksum computed again, as far as it has what they need."""
    group = json.loads(text)
    attributes = group["attributes"]["activation_store"]
    attributes.pop("sha256", None)
    try:
        names = StoreMetadata.__dataclass_fields__
        attributes["fingerprint"] = StoreMetadata(**{name: attributes[name] for name in names}).fingerprint()
    except Exception:  # the edited values decide whether there can be one
        pass
    attributes["sha256"] = json_digest(group)
    return json.dumps(group)


def edit_root(*path: str | int, value: Any) -> Callable[[Path], None]:
    def edit(store: Path) -> None:
        group = json.loads((store / "zarr.json").read_text())
        *parents, last = path
        target = functools.reduce(lambda node, key: node[key], parents, group["attributes"]["activation_store"])
        target[last] = value
        (store / "zarr.json").write_text(seal_root(json.dumps(group)))

    return edit


def seal_record(store: Path, key: str = _RECORD, **changes: Any) -> None:
    record = {**json.loads((store / key).read_text()), **changes}
    record.pop("sha256")
    (store / key).write_text(json.dumps({**record, "sha256": json_digest(record)}))


def edit_record(**changes: Any) -> Callable[[Path], None]:
    """Edits a record of an unfinished store, of which no summary repeats the record."""

    def edit(store: Path) -> None:
        edit_root("complete", value=False)(store)
        edit_root("summary", value=None)(store)
        seal_record(store, **changes)

    return edit


def put_table(make: Callable[[pa.Table], bytes], key: str = _TABLE) -> Callable[[Path], None]:
    """Replaces a block's parquet file, and its sha256 in the record."""

    def edit(store: Path) -> None:
        content = make(pq.read_table(store / key))
        (store / key).write_bytes(content)
        kind = "documents" if key == _TABLE else "statistics"
        seal_record(store, **{f"{kind}_sha256": sha256(content).hexdigest()})

    return edit


def put_summary(kind: str, make: Callable[[pa.Table], bytes]) -> Callable[[Path], None]:
    def edit(store: Path) -> None:
        [path] = store.glob(f"_summary/{kind}-*.parquet")
        content = make(pq.read_table(path))
        digest = sha256(content).hexdigest()
        (store / f"_summary/{kind}-{digest[:16]}.parquet").write_bytes(content)
        edit_root("summary", kind, value=digest)(store)
        if kind == "ids":
            edit_root("summary", "ids_bytes", value=len(content))(store)

    return edit


def encoded(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(
        table, sink, **{"compression": "zstd", "use_dictionary": False, "write_statistics": False, **options}
    )
    return sink.getvalue()


def with_column(name: str, make: Callable[[int], pa.Array], **options: Any) -> Callable[[pa.Table], bytes]:
    """The table with another column of this name. make: from the number of rows."""

    def replaced(table: pa.Table) -> bytes:
        column = make(table.num_rows)
        index = table.column_names.index(name) if name in table.column_names else table.num_columns
        table = table.remove_column(index) if index < table.num_columns else table
        return encoded(table.add_column(index, name, column), **options)

    return replaced


def _put_column(name: str, make: Callable[[int], pa.Array], table: pa.Table) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, make(table.num_rows))


def nested(levels: int) -> pa.DataType:
    return functools.reduce(lambda inner, _: pa.list_(inner), range(levels), pa.int64())


_COLUMNS: dict[str, Callable[[int], pa.Array]] = {
    "null": lambda n: pa.nulls(n),
    "bool": lambda n: pa.array([True] * n),
    "binary": lambda n: pa.array([b"\xff\xfe"] * n, pa.binary()),
    "huge integers": lambda n: pa.array([2**64 - 1] * n, pa.uint64()),
    "negative": lambda n: pa.array([-(2**63)] * n, pa.int64()),
    "not finite": lambda n: pa.array([float("nan")] * n),
    "decimal": lambda n: pa.array([None] * n, pa.decimal128(38, 37)),
    "timestamps": lambda n: pa.array([2**63 - 1] * n, pa.timestamp("ns", "Mars/Phobos")),
    "lists": lambda n: pa.array([[1]] * n),
    "deep lists": lambda n: pa.nulls(n, nested(60)),
    "structures": lambda n: pa.array([{"a": {"b": 1}}] * n),
    "map": lambda n: pa.array([[("a", 1)]] * n, pa.map_(pa.string(), pa.int64())),
    "dictionary": lambda n: pa.array(["a"] * n).dictionary_encode(),
}
_BOMBS: dict[str, Callable[[pa.Table], bytes]] = {
    "one long text": with_column("url", lambda n: pa.array(["a" * _BOMB] + [""] * (n - 1), pa.large_string())),
    "a repeated text": with_column(
        "url", lambda n: pa.array(["a" * (_BOMB // n)] * n), use_dictionary=True, dictionary_pagesize_limit=_BOMB
    ),
    "repeated beginnings of texts": with_column(
        "url", lambda n: pa.array(["a" * (60 << 20)] * n), column_encoding={"url": "DELTA_BYTE_ARRAY"}
    ),
    "a list of nulls": with_column(
        "url", lambda n: pa.array([[None] * (_BOMB // 16)] + [[]] * (n - 1), pa.list_(pa.int64()))
    ),
    "a list of zeros": with_column("url", lambda n: pa.array([np.zeros(_BOMB // 8)] + [[]] * (n - 1))),
    "fixed size": with_column("url", lambda n: pa.array([bytes(_BOMB // n)] * n, pa.binary(_BOMB // n))),
    "many rows": lambda table: encoded(pa.concat_tables([table.slice(0, 1)] * 1 + [_many_rows(table)])),
    "many row groups": lambda table: encoded(pa.table({"document": np.zeros(20_000, np.int64)}), row_group_size=1),
    "many columns": lambda table: encoded(pa.table({f"c{n}": [0] for n in range(20_000)})),
    "large metadata": lambda table: encoded(table.replace_schema_metadata({"a": "b" * (8 << 20)})),
    "no rows": lambda table: encoded(table.slice(0, 0)),
    "no columns": lambda table: encoded(table.select([])),
    "empty": lambda table: b"",
    "footer of all": lambda table: b"PAR1" + (0xFFFFFFF0).to_bytes(4, "little") + b"PAR1",
    "footer of garbage": lambda table: b"PAR1" + os.urandom(200) + (200).to_bytes(4, "little") + b"PAR1",
    "lying page": lambda table: _lying_page(encoded(table)),
}


def _many_rows(table: pa.Table) -> pa.Table:
    return pa.table({f.name: pa.nulls(20_000_000, f.type) for f in table.schema}, schema=table.schema)


def _lying_page(content: bytes) -> bytes:
    """The first page's header says that the page is larger when it is decompressed than the footer says."""
    at = content.index(b"PAR1") + 4
    header = bytearray(content[at : at + 12])
    assert header[:2] == b"\x15\x00"  # field 1: the type, of a data page
    assert header[2] == 0x15  # field 2: the size when it is decompressed, a varint
    end = next(k for k in range(3, 12) if header[k] < 128)
    huge = bytes([0x80 | 126, *[0xFF] * (end - 4), 127]) if end > 3 else bytes([126])
    return content[: at + 3] + huge + content[at + 3 + len(huge) :]


def on_file(pattern: str, change: Callable[[Path], object]) -> Callable[[Path], None]:
    """Changes the first file that matches the pattern."""
    return lambda store: change(min(store.glob(pattern)))


def put_shard(name: str, make: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Replaces a store shard. Its digest in the record stays, so verify reports at least that."""
    return on_file(f"{name}/c.0.*", lambda path: path.write_bytes(make(path.read_bytes())))


def put_text(key: str, text: str | bytes) -> Callable[[Path], None]:
    content = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return on_file(key, lambda path: path.write_bytes(content))


def in_json(key: str, name: str, text: str) -> Callable[[Path], None]:
    """Replaces a value in JSON by this text, which need not be JSON."""

    def edit(store: Path) -> None:
        document = json.loads((store / key).read_text())
        (document["attributes"]["activation_store"] if key == "zarr.json" else document)[name] = "HERE"
        (store / key).write_text(json.dumps(document).replace('"HERE"', text))

    return edit


_ARRAY = "blocks.1.resid_post"
_FILES = ("zarr.json", f"{_ARRAY}/zarr.json", "tokens/c.0.0", f"{_ARRAY}/c.1.0.0", _RECORD, _TABLE, _STATISTICS)
_FILES += ("_summary/blocks-*", "_summary/statistics-*", "_summary/ids-*")
_JSON_TEXTS = {
    "deep": _DEEP,
    "long number": "9" * 100_000,
    "lists": "[" + "[]," * 4_000_000 + "0]",
    "half a pair": '"\\ud800"',
}


def cases() -> Iterator[Case]:
    """All cases; the first word of a name is its class."""
    counts = (("num_streams",), ("rows_per_block",), ("batch", "length"), ("arrays", _ARRAY, "width"))
    counts += (("arrays", _ARRAY, "scale_groups"),)
    counts += (("target",), ("selected",), ("summary", "ids_bytes"), ("capture", "scale_group"), ("version",))
    for path in counts:
        yield from (Case(f"root-counts {'.'.join(path)}={n}", edit_root(*path, value=n)) for n in _HUGE)
    for dtype in ("int32", "float64", "float8_e4m3fn", "bool", "O", "<f4,<f4", "S1000000000", "", "float32"):
        yield Case(f"root-dtypes {dtype}", edit_root("capture", "dtype", value=dtype))
    names = ("../x", "a/b", "..", "/etc", "", "blocks.1.resid_post\0", "x" * 10_000, "blocks.99999999999.resid_post")
    for name in names:
        yield Case(
            f"root-names {name[:20]!r}",
            edit_root("arrays", value={name: {"width": 4, "hook_name": "", "scale_groups": None}}),
        )
        yield Case(f"root-summaries {name[:20]!r}", edit_root("summary", "blocks", value=name + "0" * 64))
    for kind in ("blocks", "statistics", "ids"):
        yield from (
            Case(f"root-summaries {kind}={v!r}", edit_root("summary", kind, value=v)) for v in (None, 5, "", [1])
        )
    for key in ("rows", "tokens", "documents", "tokens_cut", "activations", "stream", "block"):
        yield from (Case(f"record-counts {key}={n}", edit_record(**{key: n})) for n in _HUGE)
    keys = ("skipped", "start", "next", "exhausted", "documents_sha256", "statistics_sha256", "digests", "recent")
    for n, key in enumerate((*keys, "written_by")):
        yield from (Case(f"record-types {key}={v!r}", edit_record(**{key: v})) for v in (_WRONG * 2)[n % 5 : n % 5 + 4])
    for n in (1 << 31, 1 << 62, 10**30):
        counts = {"shard": n, "document": n, "token": n, "ordinal": n}
        yield Case(f"record-counts cursors={n}", edit_record(start=counts, next=counts))
    for number in ("999999", "4294967295", "99999999999999999999999"):
        for folder in ("stream-00000", f"stream-{number}"):
            yield Case(
                f"record-numbers {folder}/{number}", functools.partial(_copy_record, f"{folder}/block-{number}.json")
            )
    for name, make in _BOMBS.items():
        yield Case(f"table-bombs {name}", put_table(make))
    for name, make in _BOMBS.items():
        if "rows" in name or "column" in name or "footer" in name or "list" in name or name == "empty":
            yield Case(f"statistics-bombs {name}", put_table(make, _STATISTICS))
            yield Case(f"summary-bombs {name}", put_summary("blocks", make))
            yield Case(f"summary-bombs statistics {name}", put_summary("statistics", make))
            yield Case(f"ids-bombs {name}", put_summary("ids", make))
    for n, (name, make) in enumerate(_COLUMNS.items()):
        columns = ("document", "id", "source", "index", "n_tokens", "n_cut", "first_token", "last_token", "url")
        for column in dict.fromkeys((columns[n % len(columns)], columns[(n + 4) % len(columns)], "document")):
            yield Case(f"table-types {column} {name}", put_table(with_column(column, make)))
        column = ("mean", "count", "array", "norm_histogram", "m2")[n % 5]
        yield Case(f"statistics-types {column} {name}", put_table(with_column(column, make), _STATISTICS))
        yield Case(f"summary-types stream {name}", put_summary("blocks", with_column("stream", make)))
        yield Case(f"ids-types shard {name}", put_summary("ids", with_column("shard", make)))
        for group_column in ("document", "prompt") if name != "timestamps" else ():  # which has no digest
            edit = put_group(functools.partial(_put_column, group_column, make))
            yield Case(f"group-types {group_column} {name}", edit)
    yield Case("group-tables no columns", put_group(lambda table: table.select([])))
    yield Case("group-tables no rows", put_group(lambda table: table[:0]))
    yield Case("group-tables twice", put_group(lambda table: table.append_column("prompt", table["prompt"])))
    for size in (1 << 30, 1 << 20, 1):
        bomb = pa.Codec("zstd").compress(bytes(size), asbytes=True)
        yield Case(f"shard-bombs zstd {size}", put_shard(_ARRAY, functools.partial(_zstd_shard, bomb)), kind="zstd")
    for key in _FILES:
        yield Case(f"sparse {key}", on_file(key, lambda path: os.truncate(path, 4 << 30)))
    for key in ("zarr.json", _RECORD, f"{_ARRAY}/zarr.json"):
        yield from (Case(f"json {key} {name}", put_text(key, text)) for name, text in _JSON_TEXTS.items())
        yield Case(f"json {key} not UTF-8", put_text(key, b"{\xff}"))
        name = {"zarr.json": "config", _RECORD: "skipped"}.get(key, "attributes")
        yield from (Case(f"json-values {key} {what}", in_json(key, name, text)) for what, text in _JSON_TEXTS.items())


def put_group(make: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    """Makes the store one of generated documents, with a group of two documents."""
    group = pa.table(
        {"document": [0, 2], "prompt": [[1, 2], [3]], "completion": [[4], [5]]},
        schema=pa.schema([("document", pa.int64()), *((n, pa.list_(pa.int32())) for n in ("prompt", "completion"))]),
    )

    def edit(store: Path) -> None:
        edit_root("data", "source", value="generate")(store)
        path = store / group_key(0, 0)
        path.parent.mkdir(parents=True)
        table, state = make(group), {"next": {}, "exhausted": True}
        state |= {"sha256": group_files._digest(table, state, 0, 0)}
        metadata = {group_files._METADATA: json.dumps(state)}  # `encode_group` refuses some of these tables
        path.write_bytes(encoded(table.replace_schema_metadata(metadata), write_page_checksum=True))

    return edit


def _copy_record(name: str, store: Path) -> None:
    edit_record()(store)
    path = store / "_commits" / name
    path.parent.mkdir(exist_ok=True)
    shutil.copyfile(store / _RECORD, path)


def _zstd_shard(bomb: bytes, content: bytes) -> bytes:
    """A shard whose first chunk is the bomb; the other chunks are absent."""
    num_chunks = next(n for n in range(1, 4096) if checksum(content[-16 * n - 4 : -4]) == content[-4:])
    index = np.full((num_chunks, 2), ABSENT, "<u8")
    index[0] = 0, len(bomb) + 4
    return bomb + checksum(bomb) + index.tobytes() + checksum(index.tobytes())


class Result(NamedTuple):
    name: str
    failure: str  # "" if the case passed
    mib: float  # above what the process held before


def check(case: Case, images: dict[str, Path], folder: Path) -> Result:
    store = Path(tempfile.mkdtemp(dir=folder)) / "store"
    shutil.copytree(images[case.kind], store)
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    try:
        case.edit(store)
        held = _memory_mib("VmRSS")
        limit = int(_memory_mib("VmSize") * (1 << 20)) + (_LIMIT_GIB << 30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        read_content(str(store))
        with suppress(PipelineError):
            verify_store(str(store))
        mib = _memory_mib("VmHWM") - held
        failure = f"{mib:.0f} MiB" if mib > MAX_MIB else ""
    except Exception as error:  # finding any exception is the purpose
        mib, failure = 0.0, f"{describe(error)}\n{traceback.format_exc(limit=-4)}"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        shutil.rmtree(store.parent)
    return Result(case.name, failure, mib)


def _memory_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def _check_named(name: str, images: dict[str, Path], folder: Path) -> Result:
    return check(next(case for case in cases() if case.name == name), images, folder)


def run_cases(names: Sequence[str], processes: int) -> list[Result]:
    """Checks the cases with these names in a pool of processes with limited memory."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        images = {kind: Path(folder) / kind for kind in ("int8", "zstd")}
        for kind, path in images.items():
            write_image(str(path), full_image(kind))
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            call = functools.partial(_check_named, images=images, folder=Path(folder))
            return list(pool.map(call, names))
