"""Random damage to stores of every kind, checked in a process that may die of it.

(a) `verify_store` finds a problem or raises a StoreError, or the content equals that of the sound store: everything
    that `ActivationStore` returns, the metadata of its arrays, and groups, which may be absent. An unfinished store may
    lose the last records of its streams: that is an earlier, sound state of it.
(b) Each item that `ActivationStore` returns is unchanged, or raises a StoreError, if the damage is visible.
(c) Only PipelineErrors are raised, and reading changes nothing.
"""

import itertools
import json
import multiprocessing
import random
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.errors import PipelineError
from pipeline.store import ActivationStore, FeatureBatch
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.commits import parse_commit_key
from pipeline.store.format.keys import Kind
from pipeline.store.write.store_writer import StoreWriter
from tests.store.damage import Damage, damaged, kind_of
from tests.store.damage_stores import Specimen
from tests.store.example_store import Image, in_memory, read_image

LIMIT_S = 120.0  # per case, before it is taken to hang; most take 0.05 s
LIMIT_GIB = 4  # per case, so that a huge shape raises MemoryError


class Outcome(StrEnum):
    caught = "caught"
    harmless = "harmless"
    missed = "MISSED"  # not (a), and perhaps not (b)
    misread = "MISREAD"  # not (b): verify reports it, but a reader does not notice
    crashed = "CRASHED"  # not (c)

    @property
    def is_failure(self) -> bool:
        return self.value.isupper()


class Case(NamedTuple):
    """One damaged store and its outcome. why: verify's first problem, or the program's fault."""

    kind: str
    seed: int
    operator: str
    damage: str
    outcome: Outcome
    why: str


@dataclass(frozen=True)
class Failed:
    """An item that could not be read, because of a PipelineError."""

    message: str = field(compare=False)


Content = Mapping[str, Any]  # by item of a store, something small that is equal if and only if the values are


def read_content(path: str) -> Content:
    """Everything that a reader gets, by item; `Failed` for items that raise a PipelineError."""
    content: dict[str, Any] = {}

    def item(name: str, read: Callable[[], Any]) -> Any:
        try:
            value = read()
        except PipelineError as error:
            value = Failed(str(error))
        except Exception as error:
            error.add_note(f"while reading {name}")
            raise
        content[name] = _digest(value)
        return value

    store = item("open", lambda: ActivationStore.open(path))
    item("writer", lambda: StoreWriter.open_existing(path))
    if isinstance(store, Failed):
        return content
    item("root", lambda: (store.metadata, store.complete, store.weights_error, store.keys, store.length, store.slots))
    item("blocks", lambda: list(store.blocks))
    item("rows", lambda: (store.rows, store.num_tokens, store.num_activations))
    item("shapes", lambda: {name: (a.shape[1:], a.dtype.name, a.domain.labels) for name, a in store.arrays.items()})
    item("tokens", lambda: vars(store.read_tokens(store.rows, whole=True)))
    item("selected", lambda: store.read_selected(store.rows))
    item("outputs", lambda: store.read_outputs(store.rows))
    for key in store.keys:
        item(f"activations of {key.name}", lambda key=key: store.read(key, store.rows))
        item(f"statistics of {key.name}", lambda key=key: vars(store.statistics(key)))
    documents = item("documents", store.documents)
    if not isinstance(documents, Failed) and documents.num_rows:
        by_id = ActivationStore.open(path)  # `store` has read all document tables, so it would not use the index of ids
        for row in (0, documents.num_rows // 2, -1):
            number, id = documents["document"][row].as_py(), documents["id"][row].as_py()
            item(f"document {number}", lambda number=number: vars(store.document(number)))
            item(f"document {id!r}", lambda id=id: vars(by_id.document(id)))
    options = {"shuffle": True, "buffer_mib": 0.1, "features": bool(store.metadata.encoders)}
    item("batches", lambda: [vars(batch) for batch in store.batches(list(store.keys), 64, **options)])
    return content


def _digest(value: Any) -> Any:
    match value:
        case Failed():
            return value
        case ActivationStore() | StoreWriter():
            return type(value).__name__
        case np.ndarray():
            return value.dtype.name, value.shape, sha256(np.ascontiguousarray(value).view(np.uint8)).hexdigest()
        case FeatureBatch():
            return _digest(vars(value))
        case pa.Table():
            return _digest(value.to_pydict())
        case Mapping():
            return {name: _digest(child) for name, child in value.items()}
        case list() | tuple():
            return [_digest(child) for child in value]
    return repr(value)


class Oracle:
    """Judges damaged copies of one sound store."""

    def __init__(self, specimen: Specimen) -> None:
        self._sound = specimen.image
        self._records = {key for key in specimen.image if kind_of(key) is Kind.record}
        self._contents: dict[frozenset[str], Content] = {}
        self._is_complete = b'"complete": true' in specimen.image["zarr.json"]

    def check(self, image: Image, damage: Damage) -> tuple[Outcome, str]:
        """The outcome for `image`, a damaged copy."""
        try:
            with in_memory(image) as path:
                problems = _problems(path)
                content = read_content(path)
                is_changed = read_image(path) != image
        except Exception as error:  # finding any exception is the purpose
            return Outcome.crashed, describe(error)
        if is_changed:
            return Outcome.crashed, "verifying or reading has changed the store"
        expected = self._expected(image)
        different = [name for name in {**expected, **content} if content.get(name) != expected.get(name)]
        misread = [name for name in different if name in content and not isinstance(content[name], Failed)]
        if problems:
            if misread and damage.is_visible:
                return Outcome.misread, f"the reader gives other {misread}; verify says {problems[0]}"
            return Outcome.caught, problems[0]
        different += [key for key in {*self._sound, *image} if self._differs(key, image)]
        if different:
            return Outcome.missed, f"verify finds nothing; different: {different}; the reader gives other {misread}"
        return Outcome.harmless, "the store's content has not changed"

    def _expected(self, image: Image) -> Content:
        """The content of the sound store; for an unfinished one, up to the records that are left."""
        missing = frozenset(self._records - set(image))
        left = set(filter(None, map(parse_commit_key, self._records - missing)))
        if self._is_complete or not all(block == 0 or (stream, block - 1) in left for stream, block in left):
            missing = frozenset()
        if missing not in self._contents:
            with in_memory({key: self._sound[key] for key in self._sound if key not in missing}) as path:
                self._contents[missing] = read_content(path)
        return self._contents[missing]

    def _differs(self, key: str, image: Image) -> bool:
        """Whether an object that no reader returns has changed: an array's metadata, or a group. Jobs generate groups
        again that are absent."""
        before, after, kind = self._sound.get(key), image.get(key), kind_of(key)
        if before == after or kind not in (Kind.array, Kind.group):
            return False
        if kind is Kind.group and None not in (before, after):
            tables = [pq.read_table(pa.BufferReader(content)) for content in (before, after)]
            return not tables[0].equals(tables[1], check_metadata=True)
        if None in (before, after):
            return before is not None and kind is Kind.array
        try:
            documents = json.loads(before), json.loads(after)
            if not self._is_complete:  # finishing it sets the numbers of rows
                for array in documents:
                    array["shape"][0] = None
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            return True
        return documents[0] != documents[1]


def describe(error: BaseException) -> str:
    """One line: type, message, and the program's innermost line in the traceback."""
    trace, place = error.__traceback__, "?"
    while trace is not None:
        if "/pipeline/" in (name := trace.tb_frame.f_code.co_filename):
            place = f"{name.rpartition('/pipeline/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    notes = " ".join(getattr(error, "__notes__", ()))
    return f"{type(error).__name__} in pipeline/{place} {notes}: {str(error)[:200]}"


def _problems(path: str) -> list[str]:
    try:
        return [str(problem) for problem in verify_store(path)]
    except PipelineError as error:
        return [f"{type(error).__name__}: {error}"]


_oracles: dict[str, Oracle] = {}  # by kind of store, of a process that judges


def _start_judging(specimens: Sequence[Specimen]) -> None:
    for specimen in specimens:
        _oracles[specimen.kind] = Oracle(specimen)
        _oracles[specimen.kind].check(specimen.image, Damage("nothing"))  # starts threads, which the limit prevents
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (LIMIT_GIB << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _judge(kind: str, image: Image, damage: Damage) -> tuple[Outcome, str]:
    return _oracles[kind].check(image, damage)


def run_cases(specimens: Sequence[Specimen], seeds: Sequence[int]) -> Iterator[Case]:
    """Damages each store once per seed; first not at all. Judges in another process, which is replaced if it dies."""
    context = multiprocessing.get_context("spawn")  # a fork would inherit TensorStore without its threads
    pool = None
    for specimen, seed in itertools.product(specimens, (-1, *seeds)):
        operator, damage, image = "none", Damage("nothing"), specimen.image
        if seed >= 0:
            rng = random.Random(f"{specimen.kind} {seed}")
            operator, damage, image = damaged(rng, specimen.image, specimen.older)
        pool = pool or ProcessPoolExecutor(1, context, _start_judging, (specimens,))
        try:
            outcome, why = pool.submit(_judge, specimen.kind, image, damage).result(LIMIT_S)
        except (BrokenProcessPool, TimeoutError) as error:
            outcome, why, pool = Outcome.crashed, f"the process died or hangs: {error!r}", None
        yield Case(specimen.kind, seed, operator, damage.what, outcome, why)
    if pool is not None:
        pool.shutdown()
