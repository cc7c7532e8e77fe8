"""The streams of a store: their number, those of this process, and the tokens that each receives."""

import math
from dataclasses import dataclass

from pipeline.cluster.devices import Topology
from pipeline.config.schema import RunConfig
from pipeline.core.errors import ConfigError
from pipeline.core.messages import counted
from pipeline.store.format.target import ALL, Target, stream_share

MAX_AUTO_STREAMS = 64
STREAMS_PER_PROCESS = 4  # for all of the data, so that other processes can help
STEPS_PER_AUTO_STREAM = 100  # limits padding, in a stream's last step, to 1 % of the stream


@dataclass(frozen=True)
class StreamPlan:
    """The streams of the store, and those of one process."""

    count: int  # streams of the store
    local: tuple[int, ...]  # this process's own streams, which it takes before others'
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
        local=tuple(range(topology.index, count, topology.count)),
        max_tokens=config.run.max_tokens,
        notes=_notes(config, count, num_source_shards, topology),
    )


def _count(config: RunConfig, num_source_shards: int, topology: Topology, stored: int | None) -> int:
    """The number of streams: as configured, else as stored, else at least one per process, and more for a larger job,
    so that processes can join later."""
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
    affordable = STREAMS_PER_PROCESS * topology.count  # the data may be small
    if config.run.max_tokens is not None:
        affordable = config.run.max_tokens // (STEPS_PER_AUTO_STREAM * config.batch.rows * config.batch.length)
    return min(num_source_shards, max(topology.count, min(affordable, MAX_AUTO_STREAMS), 1))


def _notes(config: RunConfig, count: int, num_source_shards: int, topology: Topology) -> tuple[str, ...]:
    notes = []
    if config.run.max_tokens is None and config.data.num_streams is None and count < num_source_shards:
        notes.append(
            f"at most {count} processes can work at the same time, each on one stream; the number of streams is fixed "
            f"when the store is created, by data.num_streams (up to {num_source_shards})"
        )
    if count < topology.count:
        notes.append(f"{topology.count - count} of {topology.count} processes have no stream; set data.num_streams")
    elif count % topology.count:
        busy = count / (math.ceil(count / topology.count) * topology.count)
        notes.append(
            f"{count} streams on {topology.count} processes: some wait at the end, so processes are busy {busy:.0%} of "
            f"the time; in a new store, set data.num_streams to a multiple of {topology.count}"
        )
    return tuple(notes)
