"""The streams of a store: their number, those of this process, and the tokens that each receives."""

import math
from dataclasses import dataclass

from pipeline.cluster.topology import Topology
from pipeline.config.schema import RunConfig, RunOptions
from pipeline.core.counts import counted
from pipeline.core.errors import ConfigError
from pipeline.store.format.layout import MAX_ROWS
from pipeline.store.format.target import ALL, Target, stream_share

MAX_AUTO_STREAMS = 64
STEPS_PER_AUTO_STREAM = 100  # limits padding, in a stream's last step, to 1 % of the stream


@dataclass(frozen=True)
class StreamPlan:
    """The streams of the store, and those of one process."""

    count: int  # streams of the store
    local: tuple[int, ...]  # streams that this process works on, or may claim
    max_tokens: int | None  # in all streams together; None: all tokens of the data
    notes: tuple[str, ...] = ()

    @property
    def target(self) -> Target:
        """The number of tokens that the store should contain after this run."""
        return ALL if self.max_tokens is None else self.max_tokens

    def budget(self, stream: int) -> int | None:
        """The number of valid tokens to store of a stream, its share of `max_tokens`; None: all."""
        return stream_share(self.target, self.count, stream)

    def most_tokens(self, block_slots: int) -> int | None:
        """How many valid tokens the store may hold, since a stream ends with a whole block of `block_slots` slots for
        tokens; None: all."""
        if self.max_tokens is None:
            return None
        return self.max_tokens + min(self.count, self.max_tokens) * (block_slots - 1)


def plan_streams(config: RunConfig, num_source_shards: int, topology: Topology, stored: int | None) -> StreamPlan:
    """Plans the streams. `stored` is the number of streams of the resumed store, if any. Raises ConfigError."""
    count = _count(config, num_source_shards, topology, stored)
    return StreamPlan(
        count=count,
        local=_local(config.run, count, topology),
        max_tokens=config.run.max_tokens,
        notes=_notes(config, count, num_source_shards, topology),
    )


def require_rows(plan: StreamPlan, rows_per_block: int, length: int) -> None:
    """Raises ConfigError if `max_tokens`, in rows of `length` tokens without padding, exceed a store's maximum of
    rows."""
    if plan.max_tokens is None:
        return
    block_tokens = rows_per_block * length
    num_rows = plan.count * rows_per_block * math.ceil(plan.budget(0) / block_tokens)
    if num_rows > MAX_ROWS:
        most_tokens = MAX_ROWS // (plan.count * rows_per_block) * plan.count * block_tokens
        least_length = 1 << math.ceil(math.log2(plan.max_tokens / MAX_ROWS))
        raise ConfigError(
            f"run.max_tokens = {plan.max_tokens:,} needs at least {num_rows:,} rows of batch.length = {length} tokens, "
            f"but a store has at most {MAX_ROWS:,}. In a new store, set batch.length to at least {least_length} if the "
            f"model has enough positions; otherwise, set run.max_tokens to at most {most_tokens}, and divide the data "
            "among several stores."
        )


def _count(config: RunConfig, num_source_shards: int, topology: Topology, stored: int | None) -> int:
    """The number of streams: as configured, else as stored, else at least one per process, and more for a larger
    job."""
    wanted = config.data.num_streams
    if wanted is not None:
        if not 1 <= wanted <= num_source_shards:
            raise ConfigError(
                f"data.num_streams is {wanted}, but the data has {counted(num_source_shards, 'source shard')}, and "
                f"each stream needs at least one. Set it to 1..{num_source_shards}, or to null."
            )
        return wanted
    if stored is not None:
        return stored
    step_tokens = config.batch.rows * config.batch.length
    affordable = (config.run.max_tokens or 0) // (STEPS_PER_AUTO_STREAM * step_tokens)
    least = MAX_AUTO_STREAMS if config.run.claim else 1  # independent of the worker that creates the store
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
            f"run.claim is true and run.worker_count is {run.worker_count}: workers either claim streams or have fixed "
            f"shares. Set run.claim=false, or run.worker_count=1."
        )
    return tuple(range(count))


def _notes(config: RunConfig, count: int, num_source_shards: int, topology: Topology) -> tuple[str, ...]:
    notes = []
    if config.run.claim:
        notes.append(
            f"each process claims one stream at a time, so at most {count} can work at the same time; the "
            f"number is fixed when the store is created, by data.num_streams (up to {num_source_shards})"
        )
    elif config.run.max_tokens is None and config.data.num_streams is None and count < num_source_shards:
        notes.append(
            f"the number of streams is fixed when the store is created; set data.num_streams (up to "
            f"{num_source_shards}) if more processes or workers will share this job later"
        )
    if count < topology.count:
        notes.append(f"{topology.count - count} of {topology.count} processes have no stream; set data.num_streams")
    elif not config.run.claim and count % topology.count:
        notes.append(_uneven_note(count, num_source_shards, topology.count))
    return tuple(notes)


def _uneven_note(count: int, num_source_shards: int, processes: int) -> str:
    most = math.ceil(count / processes)
    even = next((n * processes for n in (most, count // processes) if n * processes <= num_source_shards), None)
    remedy = f"; in a new store, set data.num_streams={even}" if even else ""
    return (
        f"{count} streams on {processes} processes: some processes have {most}, others {count // processes} and wait "
        f"at the end, so processes are busy {count / (most * processes):.0%} of the time{remedy}"
    )
