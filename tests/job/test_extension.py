"""A store is extended while older commands, `finalize` and readers interfere: it ends as if nothing had interfered, and
is never complete while it is half done."""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from pipeline.config import composing
from pipeline.core.errors import PipelineError
from pipeline.job.running import run
from pipeline.store import ActivationStore
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.summary import summary_key
from pipeline.store.io.storage import Storage
from tests.job.extension_steps import Scheduler, finalize_store, run_job
from tests.jobs import run_first_stream, without_writer, write_text
from tests.store.damage_stores import make_specimen
from tests.store.example_store import Image, in_memory, read_image
from tests.store.written_check import assert_well_written

pytestmark = pytest.mark.heavy
OLD, MIDDLE = "run.max_tokens=300", "run.max_tokens=500"
TARGETS = ("run.max_tokens=700", "run.max_tokens=null")  # more tokens, and all of them


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> tuple[str, ...]:
    text = write_text(tmp_path_factory.mktemp("text"), files=2, documents=7, max_characters=600)
    settings = ("data.num_streams=2", "batch.rows=2", "batch.length=32", "capture.layers=[1]", "store.rows_per_block=4")
    return (f"data.path={text}", *settings, "run.progress=false")


@dataclass(frozen=True)
class Stores:
    """The stores before, during and after an extension. `extended` and `half_done` are by target.

    old_begun: before the second of its streams is filled. middle: extended a little. half_done: after the first of the
    streams is extended.
    """

    old: Image
    old_begun: Image
    middle: Image
    half_done: Mapping[str, Image]
    extended: Mapping[str, Image]

    def start(self, case: "Case") -> Image:
        return {"old": self.old, "old begun": self.old_begun, "half done": self.half_done[case.target]}[case.start]


@pytest.fixture(scope="module")
def stores(command) -> Stores:
    def made(before: Image, *overrides: str, most_streams: int | None = None) -> Image:
        with in_memory(before) as path:
            run_job(path, *command, *overrides, most_streams=most_streams)
            if most_streams is None:
                assert verify_store(path) == []
                assert_well_written(path)
            assert is_complete(path) == (most_streams is None)
            return read_image(path)

    old = made({}, OLD)
    half_done = {target: made(old, target, most_streams=1) for target in TARGETS}
    extended = {target: made(old, target) for target in TARGETS}
    return Stores(old, made({}, OLD, most_streams=1), made(old, MIDDLE), half_done, extended)


def comparable(image: Image) -> dict[str, object]:
    """The objects of a store, without what differs between runs, and earlier summaries."""
    root = json.loads(image["zarr.json"])
    attributes = root["attributes"]["activation_store"]
    # The path is in the configuration, and the checksum covers both.
    for key in ("created", "config", "sha256"):
        attributes.pop(key, None)
    summary = {summary_key(kind, name) for kind, name in (attributes["summary"] or {}).items() if isinstance(name, str)}
    left_out = ("_jobs/2", "_jobs/lease-", "_summary/")
    kept = {key: content for key, content in image.items() if not key.startswith(left_out) or key in summary}
    return {key: without_writer(content) if _is_record(key) else content for key, content in kept.items()} | {
        "zarr.json": root
    }


def assert_undisturbed(image: Image, expected: Image) -> None:
    left, right = comparable(image), comparable(expected)
    assert sorted(left) == sorted(right)
    assert [key for key in left if left[key] != right[key]] == []


def is_complete(path: str) -> bool:
    return ActivationStore.open(path).complete


DISTURB: dict[str, Callable[..., object]] = {
    "older command": lambda path, command, old: run_job(path, *command, OLD),
    "middle command": lambda path, command, old: run_job(path, *command, MIDDLE),
    "finalize": lambda path, command, old: finalize_store(path),
    "forced finalize": lambda path, command, old: finalize_store(path, is_forced=True),
}


@pytest.mark.parametrize("name", DISTURB)
def test_a_half_done_extension_is_completed_by_force_only_and_can_be_continued(command, stores, name):
    for target in TARGETS:
        with in_memory(stores.half_done[target]) as path, in_memory(stores.old) as old_path:
            DISTURB[name](path, command, old_path)
            if name != "middle command":  # which may happen to reach the target
                assert is_complete(path) == (name == "forced finalize")
            run_job(path, *command, target)
            assert_undisturbed(read_image(path), stores.extended[target])
            DISTURB[name](path, command, old_path)  # an extended store stays as it is
            assert_undisturbed(read_image(path), stores.extended[target])


@pytest.mark.parametrize(
    "overrides",
    [
        ("capture.positions=last", "capture.per_row=1", "batch.long_documents=cut"),
        ("capture.positions=sample", "capture.rate=0.4", "batch.packing=pad"),
    ],
    ids=" ".join,
)
def test_a_block_does_not_depend_on_max_tokens(command, overrides):
    """A store that is extended step by step always equals one that is made in one go, and a smaller target leaves it as
    it is. Tests of data=generate do the same with the model."""
    settings, sizes = (*command, *overrides, "store.rows_per_block=2"), []
    with in_memory({}) as extended:
        for max_tokens in (1, 150, 300, 10**6):
            run_job(extended, *settings, f"run.max_tokens={max_tokens}")
            with in_memory({}) as at_once:
                run_job(at_once, *settings, f"run.max_tokens={max_tokens}")
                assert_undisturbed(read_image(extended), read_image(at_once))
            sizes.append(len(ActivationStore.open(extended).blocks))
        assert sizes == sorted({*sizes}), "the targets must differ in blocks"
        before = read_image(extended)
        for max_tokens in (1, 300):
            run_job(extended, *settings, f"run.max_tokens={max_tokens}")
            assert read_image(extended) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["older command", "finalize"])
def test_a_half_done_extension_of_decoding_is_not_completed(tmp_path, name):
    """Real jobs run here. The groups of the missing blocks, with their activations, are not deleted."""
    path, other = (tmp_path / name for name in ("store", "undisturbed"))
    specimen = make_specimen("decode", tmp_path)
    command = specimen.command
    for store in (path, other):
        run(composing.compose([*command, f"store.path={store}", "run.max_tokens=200"]))
    run(composing.compose([*command, f"store.path={other}"]))
    run_first_stream(*command, f"store.path={path}")
    groups = {file: file.read_bytes() for file in path.glob("_generated/*/*.parquet")}
    assert groups
    if name == "older command":
        run(composing.compose([*command, f"store.path={path}", "run.max_tokens=200"]))
    else:
        assert finalize_store(str(path)) is not None
    assert not is_complete(str(path))
    assert {file: file.read_bytes() for file in path.glob("_generated/*/*.parquet")} == groups
    run(composing.compose([*command, f"store.path={path}"]))
    assert_undisturbed(read_image(str(path)), read_image(str(other)))


@dataclass(frozen=True)
class Case:
    """One interleaving. `start` names the store of `Stores` that it begins with."""

    seed: int
    target: str
    jobs: int
    start: str
    disturbances: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.seed} {self.start} to {self.target}, {self.jobs} jobs: {', '.join(self.disturbances)}"


class Readers:
    """Readers that are opened at any time, and read then or later: always the same values, and never an error."""

    def __init__(self, path: str, complete: Sequence[Image], final: Image) -> None:
        """`complete`: the stores that may be complete, the last of which is `final`."""
        self._path = path
        self._records = [{key: without_writer(image[key]) for key in image if _is_record(key)} for image in complete]
        with in_memory(final) as final_path:
            store = ActivationStore.open(final_path)
            self._rows, self._whole = store.rows, _values(store, store.rows)
        self._open: list[ActivationStore] = []
        self.num_right = 0

    def look(self, rng: random.Random, may_be_forced: bool) -> None:
        """Opens a reader, checks that the store is complete only if it may be, and reads with one of the last four."""
        store = ActivationStore.open(self._path)
        if store.complete and not may_be_forced:
            storage = Storage.open(self._path)
            records = {key: without_writer(storage.read(key)) for key in storage.list_keys("_commits/")}
            assert records in self._records, "the store is complete while it is half done"
        self._open = [*self._open, store][-4:]
        self._read(rng.choice(self._open))

    def _read(self, store: ActivationStore) -> None:
        found = _values(store, store.rows)
        at = np.searchsorted(self._rows, store.rows)
        assert np.array_equal(self._rows[at], store.rows)
        for values, expected in zip(found, self._whole, strict=True):
            assert np.array_equal(values, expected[at])
        self.num_right += 1


def _values(store: ActivationStore, rows: np.ndarray) -> list[np.ndarray]:
    tokens = store.read_tokens(rows)
    return [tokens.tokens, tokens.segments, tokens.documents, store.read("blocks.1.resid_post", rows)]


def _is_record(key: str) -> bool:
    return key.startswith("_commits/stream-")


def interleave(case: Case, command: Sequence[str], stores: Stores) -> Readers:
    """Extends a store while it is disturbed; asserts that it is never complete too early and ends as it should."""
    rng, final = random.Random(case.seed), stores.extended[case.target]
    with in_memory(stores.start(case)) as path, in_memory(stores.old) as old_path:
        readers = Readers(path, (stores.old, stores.middle, final), final)
        may_be_forced = "forced finalize" in case.disturbances
        jobs = {f"extension {k}": partial(run_job, path, *command, case.target) for k in range(case.jobs)}
        disturbing = {name: partial(DISTURB[name], path, command, old_path) for name in case.disturbances}
        scheduler = Scheduler(rng, jobs | disturbing)
        with closing(scheduler.run()) as turns:
            for _ in turns:
                if rng.random() < 0.2:
                    readers.look(rng, may_be_forced)
        for name, error in scheduler.errors.items():
            assert isinstance(error, PipelineError), f"{name}: {error!r}"
            assert error.exit_code == 1, f"{name}: {error!r}"
        if not jobs.keys().isdisjoint(scheduler.errors):  # exit code 1: the user runs the command again
            run_job(path, *command, case.target)
        readers.look(rng, may_be_forced=False)
        assert verify_store(path) == []
        assert_undisturbed(read_image(path), final)
    return readers


def cases(seeds: range) -> Iterator[Case]:
    for seed in seeds:
        rng = random.Random(f"case {seed}")
        start = rng.choice(("old", "old", "half done", "old begun"))
        disturbances = tuple(rng.sample([*DISTURB], rng.choice((1, 1, 2, 3))))
        yield Case(seed, rng.choice(TARGETS), rng.choice((1, 2)), start, disturbances)


@pytest.mark.parametrize("case", list(cases(range(10))), ids=str)
def test_a_disturbed_extension_ends_as_an_undisturbed_one(command, stores, case):
    interleave(case, command, stores)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 400, 50))
def test_three_hundred_interleavings(command, stores, first):
    """Enough to meet rare interleavings, such as a job that finishes the store between two writes of another."""
    readers = [interleave(case, command, stores) for case in cases(range(first, first + 50))]
    assert sum(reader.num_right for reader in readers) > 100
