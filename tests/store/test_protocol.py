"""The protocol of writers, enumerated: every interleaving of a few processes, with crashes and lost answers, on storage
that is a dictionary. The writers are those of `block_protocol`; without any one of its rules, a violation is found.

A process is run again with the answers that it got so far, until it asks more. So a state of the world is the content
of the storage and each process's answers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.core.errors import StoreError
from pipeline.data.documents import DOCUMENT_SCHEMA
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.commits import CommitRecord, commit_key
from pipeline.store.format.layout import ArraySpec, StoreLayout
from pipeline.store.format.statistics import (
    decode_statistics,
    encode_statistics,
    statistics_key,
    token_statistics,
)
from pipeline.store.format.tables import table_key
from pipeline.store.format.target import is_reached
from pipeline.store.io.parquet import encode_table, table_digest
from pipeline.store.io.shards import decode_shard, values_digest
from pipeline.store.write import block_protocol
from pipeline.store.write.block_protocol import Encode, NewBlock, PutAnswer, write_block

ARRAYS = ArraySpec("embed", "float32", 16), ArraySpec("final_norm", "float32", 1)
LAYOUT = StoreLayout(1, 1, 2, ARRAYS)
DIVIDED = replace(LAYOUT, shard_bytes=64)  # a block of `embed` is two store shards
CURSORS = [{"shard": 0, "document": number, "token": 0, "ordinal": number} for number in range(3)]
TOKENS = 2  # per block


@dataclass(frozen=True)
class Writer:
    """rounding: of its statistics and of the arrays `rounded`. text: of its tokens; a misconfigured one has another."""

    rounding: int
    text: int = 1
    rounded: tuple[str, ...] = ("embed",)

    def block(self, number: int) -> NewBlock:
        arrays = {
            spec.name: np.full(LAYOUT.block_shape(spec), self.text + number, spec.dtype) for spec in LAYOUT.all_arrays
        }
        for name in self.rounded:
            arrays[name] += np.float32(self.rounding / 16)
        own = {name: values.copy() for name, values in arrays.items()}
        record = CommitRecord(
            0,
            number,
            1,
            TOKENS,
            TOKENS,
            1,
            0,
            (),
            CURSORS[number],
            CURSORS[number + 1],
            False,
            written_by=f"writer {self.rounding}",
        )
        described = own if Rules.early_statistics else arrays
        return NewBlock(record, arrays, table(self.text, number), lambda _: self._derived(number, described))

    def _derived(self, number: int, arrays: dict[str, np.ndarray]) -> tuple[dict[str, bytes], tuple]:
        statistics = {spec.name: token_statistics(arrays[spec.name][0]) for spec in LAYOUT.arrays}
        jitter = self.rounding / 2**20  # devices add up in another order than hosts
        statistics = {name: replace(part, norm_sum=part.norm_sum + jitter) for name, part in statistics.items()}
        recent = ((1, TOKENS, TOKENS, 1, 0, 0, 0, 0),) * (number % 2)
        return {statistics_key(0, number): encode_statistics(statistics)}, recent


class Rules:
    """Which rules are switched off."""

    replaces = early_record = no_adoption = no_comparison = early_statistics = unconditional_root = False


@cache
def table(text: int, number: int) -> pa.Table:
    values = {
        name: [f"{text}" if pa.types.is_string(DOCUMENT_SCHEMA.field(name).type) else number]
        for name in DOCUMENT_SCHEMA.names
    }
    return pa.table(values, schema=DOCUMENT_SCHEMA)


Answers = tuple[tuple[Any, ...], ...]  # by step: of each request, whether it wrote the object, or the content read


class Asked(Exception):
    """A writer's next requests, whose answers are not known: each as (key, content; None to read)."""


class Replay:
    """Answers a writer's requests as before."""

    def __init__(self, answers: Answers) -> None:
        self.answers = iter(answers)

    def put(self, puts: Mapping[str, Encode]) -> list[PutAnswer]:
        if (known := next(self.answers, None)) is None:
            raise Asked(*((key, b"".join(encode()[0])) for key, encode in puts.items()))
        # Without adoption, a writer takes a refused put of a shard for its own.
        return [
            PutAnswer(answer or (Rules.no_adoption and not key.startswith("_")), encode()[1])
            for (key, encode), answer in zip(puts.items(), known, strict=True)
        ]

    def read(self, key: str, check: Callable[[str, bytes | None], Any]) -> Any:
        if (known := next(self.answers, None)) is None:
            raise Asked((key, None))
        return check(key, *known)


class AlwaysNew(Replay):
    def put(self, puts: Mapping[str, Encode]) -> list[PutAnswer]:
        return [PutAnswer(True, encode()[1]) for encode in puts.values()]


def local_state(writer: Writer, number: int, answers: Answers) -> Any:
    """What a writer does after these answers: its next requests; or how it ended."""
    objects = Replay(answers)
    try:
        if Rules.early_record:
            alone = write_block(LAYOUT, writer.block(number), AlwaysNew(()))
            objects.put({alone.key: lambda: ([alone.to_json()], b"")})
        return write_block(LAYOUT, writer.block(number), objects)
    except Asked as asked:
        return asked.args
    except StoreError as error:
        return error


Process = tuple[int, Answers, tuple[Any, ...]]  # the block, the answers of earlier steps, and those of the current one
Store = dict[str, Any]


class World:
    """Explores all states of some writers that write `num_blocks`, a finisher, and a run that raises the target."""

    def __init__(self, writers: Sequence[Writer], num_blocks: int, faults: int, has_finisher: bool = False) -> None:
        self.writers, self.num_blocks, self.has_finisher = writers, num_blocks, has_finisher
        self.local = cache(local_state)
        self.sound = cache(check_block)
        self.errors_allowed = len({writer.text for writer in writers}) > 1
        root = (False, 1, 0, 0)  # complete, target in blocks, blocks in the summary, generation
        start = (("root", root),), ((0, (), ()),) * len(writers), faults, ("read",), has_finisher
        self.seen, self.ends = {start}, set()
        pending = [start]
        while pending:
            for state in self.next_states(pending.pop()):
                if state not in self.seen:
                    self.seen.add(state)
                    pending.append(state)

    def next_states(self, state: Any) -> Iterator[Any]:
        items, processes, faults, finisher, may_extend = state
        store = dict(items)
        is_over = True
        for index, process in enumerate(processes):
            for after, changed, used in self.writer_moves(self.writers[index], process, store, faults):
                self.check(store, after)
                others = (*processes[:index], changed, *processes[index + 1 :])
                yield tuple(sorted(after.items())), others, faults - used, finisher, may_extend
                is_over = False
        if self.has_finisher:
            for after, changed, may_still in finisher_moves(store, finisher, may_extend):
                self.check(store, after)
                yield tuple(sorted(after.items())), processes, faults, changed, may_still
        if is_over:
            self.ends.add(items)
            is_whole = all(commit_key(0, number) in store for number in range(self.num_blocks))
            assert is_whole or self.errors_allowed, "a block was never committed"

    def writer_moves(
        self, writer: Writer, process: Process, store: Store, faults: int
    ) -> Iterator[tuple[Store, Process, bool]]:
        """What a writer can do next: one of its requests, or all whose content no writer has otherwise; these too
        without learning the answer of a put; or a restart."""
        number, answers, current = process
        if number == self.num_blocks:
            return
        requests = self.local(writer, number, answers)
        if isinstance(requests, CommitRecord):
            yield store, (number + 1, (), ()), False
            return
        if isinstance(requests, StoreError):
            assert self.errors_allowed, f"a writer is stuck: {requests}"
            return
        current = current or (None,) * len(requests)
        left = [index for index, answer in enumerate(current) if answer is None]
        common = [index for index in left if self.is_common(*requests[index])]
        for chosen in [common] if common else [[index] for index in left]:
            for is_lost in [False, True] if faults else [False]:
                after, answered = store, list(current)
                for index in chosen:
                    key, content = requests[index]
                    if content is None:
                        answered[index] = store.get(key)
                        continue
                    answered[index] = (Rules.replaces or key not in store) and not is_lost
                    if Rules.replaces or key not in store:
                        after = after | {key: content}
                is_done = None not in answered
                yield (
                    after,
                    (number, (*answers, tuple(answered)), ()) if is_done else (number, answers, tuple(answered)),
                    is_lost,
                )
        if faults:
            committed = next(n for n in range(self.num_blocks + 1) if commit_key(0, n) not in store)
            yield store, (min(committed, self.num_blocks), (), ()), True

    @cache  # noqa: B019
    def is_common(self, key: str, content: bytes | None) -> bool:
        """Whether the order of puts of this object does not matter, since all writers put the same content."""
        differing = (*self.writers[0].rounded, "_statistics", "_commits")
        differing += ("tokens", "_documents") if self.errors_allowed else ()
        return content is not None and not key.startswith(differing)

    def check(self, before: Store, after: Store) -> None:
        """No reader of the blocks committed before sees a change, and every committed block is sound."""
        if after is before:
            return
        committed = [number for number in range(self.num_blocks) if commit_key(0, number) in after]
        assert committed == list(range(len(committed))), "a block was committed before an earlier one"
        for number in committed:
            keys = block_keys(number)
            now = tuple(after.get(key) for key in keys)
            assert commit_key(0, number) not in before or now == tuple(before.get(key) for key in keys), (
                "a reader sees a change"
            )
            self.sound(number, now)
        complete, target, blocks, _ = after["root"]
        assert after["root"][1] >= before["root"][1], "the target was lost"
        assert blocks <= len(committed), "the summary has blocks that the store lacks"
        assert not complete or blocks >= target, "the store is complete without its blocks"


def finisher_moves(store: Store, finisher: tuple, may_extend: bool) -> Iterator[tuple[Store, tuple, bool]]:
    """A finisher reads the root, then the records, then replaces the root; a run raises the target at any time."""
    _, target, blocks, generation = store["root"]
    if may_extend:
        yield {**store, "root": (False, target + 1, blocks, generation + 1)}, finisher, False
    if finisher == ("read",):
        yield store, ("list", store["root"]), may_extend
    elif finisher[0] == "list":
        records = [CommitRecord.from_json(store[key], key) for key in sorted(store) if key.startswith("_commits")]
        is_whole = is_reached([BlockTable.from_records(records)], finisher[1][1] * TOKENS)
        yield store, ("write", finisher[1], len(records)) if is_whole else ("read",), may_extend
    elif finisher[0] == "write":
        _, root, num_blocks = finisher
        finished, is_unchanged = (True, root[1], num_blocks, root[3]), root == store["root"] or Rules.unconditional_root
        if is_unchanged and finished != root:
            store = {**store, "root": (*finished[:3], store["root"][3] + 1)}
        yield store, ("read",), may_extend


def parts() -> list[tuple[ArraySpec, int]]:
    return [(spec, part) for spec in LAYOUT.all_arrays for part in range(LAYOUT.num_parts(spec))]


def block_keys(number: int) -> list[str]:
    shards = [LAYOUT.shard_key(spec, 0, number, part) for spec, part in parts()]
    return [commit_key(0, number), table_key(0, number), statistics_key(0, number), *shards]


def check_block(number: int, contents: tuple[bytes | None, ...]) -> None:
    """The record of a block has the digests of its objects, and all of these are of one text."""
    assert None not in contents, "a record without its objects"
    record_json, documents, statistics, *shards = contents
    record = CommitRecord.from_json(record_json, "record")
    assert record.documents_sha256 == table_digest(documents), "the table is not the record's"
    assert record.statistics_sha256 == table_digest(statistics), "the statistics are not the record's"
    arrays = {spec.name: np.empty(LAYOUT.block_shape(spec), spec.dtype) for spec in LAYOUT.all_arrays}
    checksums = {name: [] for name in arrays}
    for (spec, part), shard in zip(parts(), shards, strict=True):
        arrays[spec.name][LAYOUT.part_place(spec, part)], of_part = decode_shard(shard, LAYOUT.shard_format(spec))
        checksums[spec.name].append(of_part)
    digests = {name: values_digest(of_parts) for name, of_parts in checksums.items()}
    assert digests == record.digests, "the values are not the record's"
    text = int(arrays["tokens"][0, 0]) - number
    assert documents == encode_table(table(text, number)), "the documents of one text, the tokens of another"
    assert all((arrays[name] == text + number).all() for name in ("segments", "positions", "documents")), "mixed texts"
    described = decode_statistics(statistics, "statistics", record.statistics_sha256)
    for spec in LAYOUT.arrays:
        mean = token_statistics(arrays[spec.name][0]).mean
        np.testing.assert_array_equal(described[spec.name].mean, mean, "the statistics are of other values")


BOTH = ("embed", "final_norm")
WORLDS: dict[str, tuple[int, Callable[[], World]]] = {  # with the least number of states
    "two writers, two blocks, a fault": (30_000, lambda: World([Writer(0), Writer(1)], 2, faults=1)),
    "two arrays, two faults": (20_000, lambda: World([Writer(n, rounded=BOTH) for n in range(2)], 1, faults=2)),
    "three writers": (5_000, lambda: World([Writer(n) for n in range(3)], 1, faults=0)),
    "another text": (1_000, lambda: World([Writer(0), Writer(1, text=2)], 1, faults=1)),
    "a finisher and an extension": (1_000, lambda: World([Writer(0)], 2, faults=1, has_finisher=True)),
}


LARGE = ("two arrays, two faults", "three writers")  # seconds each


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LARGE else n for n in WORLDS])
def test_no_interleaving_breaks_a_store(name: str) -> None:
    least, explore = WORLDS[name]
    world = explore()
    print(f"{name}: {len(world.seen):,} states, {len(world.ends)} ends")
    assert len(world.seen) > least


def test_no_interleaving_breaks_a_store_with_divided_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.LAYOUT", DIVIDED)
    assert len(World([Writer(0), Writer(1)], 1, faults=0).seen) > 1_000


@pytest.mark.slow
@pytest.mark.parametrize(("writers", "faults", "least"), [(4, 0, 500_000), (3, 1, 100_000)])
def test_more_writers_do_not_break_a_store(writers: int, faults: int, least: int) -> None:
    """A minute."""
    assert len(World([Writer(number) for number in range(writers)], 1, faults).seen) > least


@pytest.mark.parametrize(
    ("rule", "world", "violation"),
    [
        ("replaces", "two arrays, two faults", "is not the record's|are not the record's|a reader sees a change"),
        ("early_record", "two arrays, two faults", "a record without its objects"),
        ("no_adoption", "two arrays, two faults", "the values are not the record's"),
        ("no_comparison", "another text", "of one text, the tokens of another|mixed texts"),
        ("early_statistics", "two arrays, two faults", "the statistics are of other values"),
        ("unconditional_root", "a finisher and an extension", "the target was lost|complete without its blocks"),
    ],
)
def test_without_any_rule_a_store_breaks(
    rule: str, world: str, violation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rules, rule, True)
    if rule == "no_comparison":
        monkeypatch.setattr(block_protocol, "_is_exact", lambda spec: False)
    with pytest.raises(AssertionError, match=violation):
        WORLDS[world][1]()
