"""The streams of a store: how many it has, which of them this process works on, and how many tokens each receives."""

import math
from dataclasses import dataclass, replace

from pipeline.cluster.topology import Topology
from pipeline.config.choices import Packing
from pipeline.config.schema import BatchConfig, RunConfig, RunOptions
from pipeline.core.errors import ConfigError
from pipeline.store.format.layout import MAX_ROWS
from pipeline.store.format.target import ALL, Target, stream_share

MAX_AUTO_STREAMS = 64
STEPS_PER_AUTO_STREAM = 100  # the last step of a stream is partly padding: at most 1 % of the stream


@dataclass(frozen=True)
class StreamPlan:
    """The streams of the store, and those of one process."""

    count: int  # of the store
    local: tuple[int, ...]  # streams that this process works on, or may claim
    max_tokens: int | None  # of all streams together; None: all tokens of the data
    notes: tuple[str, ...] = ()

    @property
    def target(self) -> Target:
        """How many tokens this run wants the store to hold."""
        return ALL if self.max_tokens is None else self.max_tokens

    def budget(self, stream: int) -> int | None:
        """Valid tokens that this run wants of a stream, its share of `max_tokens`; None: all that it has."""
        return stream_share(self.target, self.count, stream)


def plan_streams(config: RunConfig, num_source_shards: int, topology: Topology, stored: int | None) -> StreamPlan:
    """`stored` is the number of streams of the store that is resumed, if any. Raises ConfigError."""
    count = _count(config, num_source_shards, topology, stored)
    return StreamPlan(
        count=count,
        local=_local(config.run, count, topology),
        max_tokens=config.run.max_tokens,
        notes=_notes(config, count, num_source_shards, topology),
    )


def require_rows(plan: StreamPlan, rows_per_block: int, length: int) -> None:
    """Raises ConfigError where `max_tokens`, in rows of `length` tokens without padding, exceed the rows of a store."""
    if plan.max_tokens is None:
        return
    block_tokens = rows_per_block * length
    num_rows = plan.count * rows_per_block * math.ceil(plan.budget(0) / block_tokens)
    if num_rows > MAX_ROWS:
        most_tokens = MAX_ROWS // (plan.count * rows_per_block) * plan.count * block_tokens
        least_length = 1 << math.ceil(math.log2(plan.max_tokens / MAX_ROWS))
        raise ConfigError(
            f"run.max_tokens = {plan.max_tokens:,} takes at least {num_rows:,} rows of batch.length = {length} tokens, "
            f"but a store has at most {MAX_ROWS:,}. For a new store set batch.length to at least {least_length}, if "
            f"the model has as many positions; or set run.max_tokens to at most {most_tokens}, and divide the data "
            "among several stores."
        )


def with_note_on_first_rows(plan: StreamPlan, batch: BatchConfig, rows_per_block: int) -> StreamPlan:
    """The plan with a note where a stream's share of `max_tokens` ends within its first block, whose rows are not in
    the order of the data."""
    block_tokens = rows_per_block * batch.length
    if batch.packing is not Packing.pack or plan.max_tokens is None or plan.budget(0) >= block_tokens:
        return plan
    note = (
        f"run.max_tokens ends each stream within its first block ({block_tokens:,} token slots), where rows that one "
        "long document fills come first: what is stored is not a representative sample of the data"
    )
    return replace(plan, notes=(*plan.notes, note))


def _count(config: RunConfig, num_source_shards: int, topology: Topology, stored: int | None) -> int:
    """As configured, else as stored, else a number that grows with the job, and at least one per process."""
    wanted = config.data.num_streams
    if wanted is not None:
        if not 1 <= wanted <= num_source_shards:
            raise ConfigError(
                f"data.num_streams is {wanted}, but the data has {num_source_shards} source shards, which are divided "
                f"among the streams. Set it to 1..{num_source_shards}, or to null."
            )
        return wanted
    if stored is not None:
        return stored
    step_tokens = config.batch.rows * config.batch.length
    affordable = (config.run.max_tokens or 0) // (STEPS_PER_AUTO_STREAM * step_tokens)
    least = MAX_AUTO_STREAMS if config.run.claim else 1  # whichever worker creates the store, the number is the same
    return min(num_source_shards, max(topology.count, least, min(affordable, MAX_AUTO_STREAMS)))


def _local(run: RunOptions, count: int, topology: Topology) -> tuple[int, ...]:
    if not 0 <= run.worker_index < run.worker_count:
        raise ConfigError(
            f"run.worker_index is {run.worker_index} with run.worker_count={run.worker_count}. "
            f"Set it to 0..{run.worker_count - 1}."
        )
    if not run.claim:
        return tuple(range(topology.index, count, topology.count))
    if run.worker_count != 1:
        raise ConfigError(
            f"run.claim is true and run.worker_count is {run.worker_count}: either workers claim streams, or each has "
            f"a fixed share. Set run.claim=false, or run.worker_count=1."
        )
    return tuple(range(count))


def _notes(config: RunConfig, count: int, num_source_shards: int, topology: Topology) -> tuple[str, ...]:
    notes = []
    if config.run.claim:
        notes.append(
            f"each process claims one stream at a time, so that {count} can work at once; the number is fixed "
            f"when the store is created, by data.num_streams (up to {num_source_shards})"
        )
    elif config.run.max_tokens is None and config.data.num_streams is None and count < num_source_shards:
        notes.append(
            f"the number of streams is fixed when the store is created; set data.num_streams (up to "
            f"{num_source_shards}) if more processes or workers are to share this job later"
        )
    if count < topology.count:
        notes.append(f"{topology.count - count} of {topology.count} processes have no stream; set data.num_streams")
    elif not config.run.claim and count % topology.count:
        notes.append(_uneven_note(count, num_source_shards, topology.count))
    return tuple(notes)


def _uneven_note(count: int, num_source_shards: int, processes: int) -> str:
    most = math.ceil(count / processes)
    even = next((n * processes for n in (most, count // processes) if n * processes <= num_source_shards), None)
    remedy = f"; for a new store set data.num_streams={even}" if even else ""
    return (
        f"{count} streams on {processes} processes: some work on {most}, others on {count // processes} and wait at "
        f"the end, so that processes are busy for {count / (most * processes):.0%} of the time{remedy}"
    )
