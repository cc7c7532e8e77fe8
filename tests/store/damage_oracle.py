"""The right outcomes for a damaged store: `verify_store` reports the damage, or the store's content has not changed.

(a) `verify_store` finds a problem or raises a StoreError, or the content equals that of the sound store: everything
    that `ActivationStore` returns, the attributes of its arrays, and what resuming reads (groups, kept activations). An
    unfinished store may lose the last records of its streams: that is an earlier, sound state of it.
(b) Each item that `ActivationStore` returns is unchanged, or raises a StoreError. This does not apply to an older root,
    nor to valid store shards that were swapped, replayed or re-encoded: a reader that does not check their digests
    accepts these.
(c) Only PipelineErrors are raised, and reading changes nothing.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.core.errors import PipelineError
from pipeline.store import ActivationStore, FeatureBatch
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.commits import parse_commit_key
from pipeline.store.write.store_writer import StoreWriter
from tests.store.damage_operators import Damage, kind_of
from tests.store.damage_stores import Specimen, resume
from tests.store.example_store import Image, in_memory, read_image

_METADATA = ("array metadata",)
_FOR_JOBS = ("group", "kept")


class Outcome(StrEnum):
    caught = "caught"
    harmless = "harmless"
    missed = "MISSED"  # not (a), and perhaps not (b)
    misread = "MISREAD"  # not (b): verify reports it, but a reader does not notice
    crashed = "CRASHED"  # not (c)
    false_alarm = "FALSE ALARM"  # a problem is reported for a sound store

    @property
    def is_failure(self) -> bool:
        return self.value.isupper()


class Verdict(NamedTuple):
    outcome: Outcome
    why: str  # verify's first problem, or the program's fault


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
            found = read()
        except PipelineError as error:
            found = Failed(str(error))
        except Exception as error:
            error.add_note(f"while reading {name}")
            raise
        content[name] = _digest(found)
        return found

    store = item("open", lambda: ActivationStore.open(path))
    item("writer", lambda: StoreWriter.open_existing(path))
    if isinstance(store, Failed):
        return content
    item("root", lambda: (store.metadata, store.complete, store.weights_error, store.keys, store.length, store.slots))
    item("blocks", lambda: list(store.blocks))
    item("rows", lambda: (store.rows, store.num_tokens, store.num_activations))
    for name, array in store.arrays.items():
        item(f"shape of {name}", lambda array=array: (array.shape[1:], array.dtype.name, array.domain.labels))
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
    item("batches", lambda: _batches(store))
    return content


def _batches(store: ActivationStore) -> list[Any]:
    """Shuffled batches of all arrays; the seed determines their order."""
    features = bool(store.metadata.encoders)
    batches = store.batches(list(store.keys), 64, shuffle=True, buffer_mib=0.1, features=features)
    return [
        (dict(batch.activations), dict(batch.features), batch.tokens, batch.positions, batch.documents)
        for batch in batches
    ]


def _digest(value: Any) -> Any:
    if isinstance(value, Failed):
        return value
    if isinstance(value, ActivationStore | StoreWriter):
        return type(value).__name__
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape, sha256(np.ascontiguousarray(value).view(np.uint8)).hexdigest()
    if isinstance(value, FeatureBatch):
        return _digest(vars(value))
    if isinstance(value, pa.Table):
        return _digest(value.to_pydict())
    if isinstance(value, Mapping):
        return {name: _digest(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [_digest(child) for child in value]
    return repr(value)


class Oracle:
    """Judges damaged copies of one sound store."""

    def __init__(self, specimen: Specimen) -> None:
        self._specimen = specimen
        self._records = {key for key in specimen.image if kind_of(key) == "record"}
        self._contents: dict[frozenset[str], Content] = {}
        self._is_complete = b'"complete": true' in specimen.image["zarr.json"]

    def check(self, image: Image, damage: Damage) -> Verdict:
        """The outcome for `image`, a damaged copy."""
        try:
            with in_memory(image) as path:
                problems = _problems(path)
                found = read_content(path)
                is_changed = read_image(path) != image
        except Exception as error:  # finding any exception is the purpose
            return Verdict(Outcome.crashed, describe(error))
        if is_changed:
            return Verdict(Outcome.crashed, "verifying or reading has changed the store")
        expected = self._expected(image)
        different = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
        misread = [name for name in different if name in found and not isinstance(found[name], Failed)]
        if problems:
            if misread and damage.is_visible:
                return Verdict(Outcome.misread, f"the reader gives other {misread}; verify says {problems[0]}")
            return Verdict(Outcome.caught, problems[0])
        different += self.different_beside(image)
        if not different:
            return Verdict(Outcome.harmless, "the store's content has not changed")
        return Verdict(
            Outcome.missed, f"verify finds nothing; different: {different}; the reader gives other {misread}"
        )

    def _expected(self, image: Image) -> Content:
        """The content of the sound store; for an unfinished one, up to the records that are left."""
        missing = frozenset(self._records - set(image))
        if self._is_complete or not _are_last(missing, self._records):
            missing = frozenset()
        if missing not in self._contents:
            with in_memory(
                {key: self._specimen.image[key] for key in self._specimen.image if key not in missing}
            ) as path:
                self._contents[missing] = read_content(path)
        return self._contents[missing]

    def different_beside(self, image: Image) -> list[str]:
        """Changed objects among those that no reader returns: attributes of arrays, and what only jobs read."""
        different = []
        for key in sorted({*self._specimen.image, *image}):
            before, after = self._specimen.image.get(key), image.get(key)
            if before == after or kind_of(key) not in (*_METADATA, *_FOR_JOBS):
                continue
            if kind_of(key) in _METADATA and (before is None or (after is not None and self._is_same(before, after))):
                continue
            different.append(key)
        return different

    def _is_same(self, left: bytes, right: bytes) -> bool:
        """Whether two texts are the same metadata."""
        try:
            metadata = json.loads(left), json.loads(right)
        except (ValueError, RecursionError):
            return False
        if not self._is_complete:  # finishing it sets the numbers of rows
            for array in metadata:
                array["shape"] = array["shape"][1:] if isinstance(array, dict) and array.get("shape") else None
        return metadata[0] == metadata[1]


def check_resumed(specimen: Specimen, image: Image, folder: Path) -> Verdict:
    """The outcome of running the job again on a store in which verify found no problem."""
    try:
        after = resume(specimen, image, folder)
    except PipelineError as error:
        return Verdict(Outcome.caught, f"by the job that resumes it: {error}")
    except Exception as error:  # finding any exception is the purpose
        return Verdict(Outcome.crashed, f"when resumed: {describe(error)}")
    with in_memory(after) as path, in_memory(specimen.finished) as finished:
        is_same = read_content(path) == read_content(finished)
    if not is_same:
        return Verdict(Outcome.missed, "verify finds nothing, and the job makes a different store")
    return Verdict(Outcome.harmless, "the job makes the same store")


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


def _are_last(missing: frozenset[str], records: set[str]) -> bool:
    """Whether the missing records are the last ones of their streams."""
    left = set(filter(None, map(parse_commit_key, records - missing)))
    return all(block == 0 or (stream, block - 1) in left for stream, block in left)
