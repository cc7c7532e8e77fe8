"""A store that is being extended, while an older command, `finalize`, `merge` and readers come between: it ends as if
nothing had, and is never complete while it is half done."""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import pytest

from pipeline.errors import PipelineError
from pipeline.store import ActivationStore
from pipeline.store.kvstore import list_keys, open_kvstore, read_key
from pipeline.store.verify import verify_store
from tests.extension_steps import Scheduler, finalize_store, merge_into, run_job
from tests.jobs import write_text
from tests.store.damage_stores import Image, in_memory, read_image

OLD = "run.max_tokens=300"
HALF = ("run.worker_count=2", "run.worker_index=0")
EXTENSIONS = {
    "one worker": [()],
    "two workers": [("run.worker_count=2", f"run.worker_index={index}") for index in range(2)],
    "two that claim": [("run.claim=true",), ("run.claim=true",)],
    "one that claims": [("run.claim=true",)],
}
DISTURBANCES = ("older command", "older command that claims", "finalize", "forced finalize", "merge")
TARGETS = ("run.max_tokens=700", "run.max_tokens=null")  # more tokens, and all of them


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> tuple[str, ...]:
    text = write_text(tmp_path_factory.mktemp("text"), files=2, documents=7, max_characters=600)
    settings = ("data.num_streams=2", "batch.rows=2", "batch.length=32", "capture.layers=[1]", "store.shard_mib=0.035")
    return (f"data.path={text}", *settings, "run.progress=false")


@pytest.fixture(scope="module")
def old(command) -> Image:
    """The finished store that is to be extended."""
    with in_memory({}) as path:
        run_job(path, *command, OLD)
        assert ActivationStore.open(path).complete
        return read_image(path)


@pytest.fixture(scope="module")
def half_done(command, old) -> Mapping[str, Image]:
    """By target, what the first of two workers leaves of an extension."""
    found = {}
    for target in TARGETS:
        with in_memory(old) as path:
            run_job(path, *command, target, *HALF)
            assert not ActivationStore.open(path).complete
            found[target] = read_image(path)
    return found


@pytest.fixture(scope="module")
def undisturbed(command, old) -> Mapping[str, Image]:
    """By target, the store of an extension that nothing disturbs."""
    found = {}
    for target in TARGETS:
        with in_memory(old) as path:
            run_job(path, *command, target)
            assert verify_store(path) == []
            found[target] = read_image(path)
    return found


def comparable(image: Image) -> dict[str, object]:
    """The objects of a store, but for what differs from run to run."""
    root = json.loads(image["zarr.json"])
    attributes = root["attributes"]["activation_store"]
    for key in ("created", "config", "sha256"):  # the place is in the configuration; both are in the root's checksum
        attributes.pop(key, None)
    return {key: content for key, content in image.items() if not key.startswith("_metrics/")} | {"zarr.json": root}


def assert_undisturbed(image: Image, expected: Image) -> None:
    left, right = comparable(image), comparable(expected)
    assert sorted(left) == sorted(right)
    assert [key for key in left if left[key] != right[key]] == []


def is_complete(path: str) -> bool:
    return ActivationStore.open(path).complete


# One after the other


DISTURB: dict[str, Callable[..., object]] = {
    "older command": lambda path, command, old: run_job(path, *command, OLD),
    "older command that claims": lambda path, command, old: run_job(path, *command, OLD, "run.claim=true"),
    "finalize": lambda path, command, old: finalize_store(path),
    "forced finalize": lambda path, command, old: finalize_store(path, is_forced=True),
    "merge": lambda path, command, old: merge_into(path, old),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [name for name in DISTURB if name != "forced finalize"])
def test_a_half_done_extension_is_not_completed(command, old, half_done, undisturbed, name, target):
    with in_memory(half_done[target]) as path, in_memory(old) as old_path:
        try:
            DISTURB[name](path, command, old_path)
        except PipelineError:
            assert name == "merge"  # a block that was truncated is another one meanwhile
        assert not is_complete(path)
        run_job(path, *command, target)
        assert_undisturbed(read_image(path), undisturbed[target])


@pytest.mark.parametrize("target", TARGETS)
def test_a_half_done_extension_that_is_completed_by_force_can_go_on(command, old, half_done, undisturbed, target):
    with in_memory(half_done[target]) as path:
        assert finalize_store(path, is_forced=True) is None
        assert is_complete(path)
        assert verify_store(path) == []
        run_job(path, *command, target)
        assert_undisturbed(read_image(path), undisturbed[target])


@pytest.mark.parametrize("target", TARGETS)
def test_a_half_done_extension_that_is_merged_into_a_new_store_is_not_complete(command, half_done, undisturbed, target):
    with in_memory(half_done[target]) as source, in_memory({}) as path:
        assert merge_into(path, source) is not None
        assert not is_complete(path)
        run_job(path, *command, target)
        assert_undisturbed(read_image(path), undisturbed[target])


@pytest.mark.parametrize("name", DISTURB)
def test_an_extended_store_stays_as_it_is(command, old, undisturbed, name):
    """Also where a truncated block is meanwhile another one, which `merge` refuses."""
    for target in TARGETS:
        with in_memory(undisturbed[target]) as path, in_memory(old) as old_path:
            try:
                DISTURB[name](path, command, old_path)
            except PipelineError:
                assert name == "merge"
            assert_undisturbed(read_image(path), undisturbed[target])


def test_a_smaller_target_does_not_shrink_a_larger_one(command, undisturbed):
    """700 after all: the store holds all and stays complete."""
    with in_memory(undisturbed["run.max_tokens=null"]) as path:
        run_job(path, *command, "run.max_tokens=700")
        assert_undisturbed(read_image(path), undisturbed["run.max_tokens=null"])


# At the same time


class Readers:
    """Readers that are opened at any time, and read then or later."""

    def __init__(self, path: str, old: Image, final: Image) -> None:
        self._path = path
        self._records = [{key: image[key] for key in image if _is_record(key)} for image in (old, final)]
        with in_memory(final) as final_path:
            store = ActivationStore.open(final_path)
            self._rows, self._whole = store.rows, _values(store, store.rows)
        self._open: list[ActivationStore] = []
        self.num_right = self.num_failed = 0

    def look(self, rng: random.Random, may_be_forced: bool) -> None:
        """A new reader finds a store that is complete only as it was or as it shall be; one of all reads."""
        try:
            store = ActivationStore.open(self._path)
        except PipelineError:
            self.num_failed += 1
            return
        if store.complete and not may_be_forced:
            kvstore = open_kvstore(self._path)
            records = {key: read_key(kvstore, key) for key in list_keys(kvstore, "_commits/") if _is_record(key)}
            assert records in self._records, "the store is complete while it is half done"
        self._open = [*self._open, store][-4:]
        self._read(rng.choice(self._open))

    def _read(self, store: ActivationStore) -> None:
        try:
            found = _values(store, store.rows)
        except PipelineError:
            self.num_failed += 1
            return
        at = np.searchsorted(self._rows, store.rows)
        assert np.array_equal(self._rows[at], store.rows)
        for values, expected in zip(found, self._whole, strict=True):
            # A truncated block is written again: its last row may have more tokens than when the reader was opened.
            is_same = (values == expected[at]).reshape(len(at), -1).all(axis=1)
            assert is_same[_is_in_whole_rows(store)].all()
        self.num_right += 1


def _is_in_whole_rows(store: ActivationStore) -> np.ndarray:
    """Which of a reader's rows are not the last of a truncated block."""
    last = {store._layout.first_row(r.stream, r.block) + r.rows - 1 for r in store.blocks if r.truncated}
    return ~np.isin(store.rows, list(last))


def _values(store: ActivationStore, rows: np.ndarray) -> list[np.ndarray]:
    tokens = store.read_tokens(rows)
    return [tokens.tokens, tokens.segments, tokens.documents, store.read(1, "resid_post", rows)]


def _is_record(key: str) -> bool:
    return key.startswith("_commits/stream-")


def interleave(
    seed: int,
    command: Sequence[str],
    start: Image,
    old: Image,
    final: Image,
    target: str,
    workers: Sequence[tuple[str, ...]],
    disturbances: Sequence[str],
) -> Readers:
    """Extends a store while it is disturbed; asserts that it is never complete too early and ends as it should."""
    rng = random.Random(seed)
    with in_memory(start) as path, in_memory(old) as old_path:
        readers = Readers(path, old, final)
        extension = {f"extension {k}": partial(run_job, path, *command, target, *w) for k, w in enumerate(workers)}
        disturbing = {name: partial(DISTURB[name], path, command, old_path) for name in disturbances}
        scheduler = Scheduler(rng, extension | disturbing)
        for _ in scheduler.run():
            if rng.random() < 0.2:
                readers.look(rng, may_be_forced="forced finalize" in disturbances)
        for name, error in scheduler.errors.items():
            assert isinstance(error, PipelineError), f"{name}: {error!r}"
            assert error.exit_code == 1 or name == "merge", f"{name}: {error!r}"
        if any(name in extension for name in scheduler.errors):  # exit code 1: whoever started it does so again
            run_job(path, *command, target)
        readers.look(rng, may_be_forced=False)
        assert verify_store(path) == []
        assert_undisturbed(read_image(path), final)
    return readers


def cases(seeds: range) -> Iterator[tuple[int, str, str, bool, list[str]]]:
    """Seed, target, workers, whether the extension has begun before, disturbances."""
    for seed in seeds:
        rng = random.Random(f"case {seed}")
        workers = rng.choice(list(EXTENSIONS))
        disturbances = rng.sample(DISTURBANCES, rng.choice((1, 1, 2, 3)))
        yield seed, rng.choice(TARGETS), workers, rng.random() < 0.3, disturbances


def case_name(case: tuple[int, str, str, bool, list[str]]) -> str:
    seed, target, workers, has_begun, disturbances = case
    return f"{seed} {target} {workers}{', begun before' if has_begun else ''}: {', '.join(disturbances)}"


def run_case(case, command, old, half_done, undisturbed) -> Readers:
    seed, target, workers, has_begun, disturbances = case
    start = half_done[target] if has_begun else old
    return interleave(seed, command, start, old, undisturbed[target], target, EXTENSIONS[workers], disturbances)


@pytest.mark.parametrize("case", list(cases(range(10))), ids=case_name)
def test_an_extension_that_is_disturbed_ends_as_if_it_were_not(command, old, half_done, undisturbed, case):
    run_case(case, command, old, half_done, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 200, 20))
def test_a_hundred_interleavings(command, old, half_done, undisturbed, first):
    readers = [run_case(case, command, old, half_done, undisturbed) for case in cases(range(first, first + 20))]
    assert sum(reader.num_right for reader in readers) > 100
