"""The host memory of a process: steps in flight, and blocks that are filled or written."""

import math
from dataclasses import dataclass, replace

from pipeline.cluster.devices import Topology
from pipeline.config.schema import RunConfig, StoreConfig
from pipeline.core.errors import ConfigError
from pipeline.planning.mesh import MeshPlan
from pipeline.step.spec import StepSpec
from pipeline.store.format.layout import LARGEST_SHARD_BYTES, MIB, is_plain_files, rows_per_block_for
from pipeline.store.indexes.features import ENTRY
from pipeline.store.write.store_writer import RUNNING_KEPT

MAX_STEPS_IN_FLIGHT = 4  # one computing, one copying to the host, one being drained, one in reserve
MAX_STEPS_PER_BLOCK = 64  # limits the work that a kill loses, and the rows that are packed ahead of the devices
MIN_BLOCKS_PER_STREAM = 8  # limits the tokens beyond run.max_tokens: a stream ends with a whole block
MIN_HOST_BUFFERS = 2  # one is filled while the other is written
_REMOTE_REQUESTS = 32  # TensorStore's concurrent requests to object storage; a block needs one per array
_BUFFERS_SHARE = 16  # a process uses 1/16 of the host's memory for buffers, since other processes may need as much
MAX_COPY_THREADS = 8  # threads that gather blocks; assumed to saturate a TPU VM's memory bandwidth, not measured on one
MAX_SORTING_THREADS = 4  # each sorts the features of one SAE in a block
_RUNNING_BYTES = 28  # running statistics per feature, kept for RUNNING_KEPT streams
_NO_OVERLAP = "with one step in flight, nothing overlaps; raise run.max_inflight_mib"
_SORTING_BYTES = 40  # memory for sorting, per feature of a token


@dataclass(frozen=True)
class HostMemoryPlan:
    """Bytes are per process."""

    step_bytes: int  # activations of one step
    step_statistics_bytes: int  # row statistics of one step
    inflight_steps: int
    block_bytes: int  # activations of one block
    block_statistics_bytes: int  # row statistics of one block
    host_buffers: int  # each holds one block
    encoded_blocks: int  # blocks encoded by TensorStore; 0 if files are written directly from the buffers
    index_bytes: int  # indexes by feature that are being made or written
    notes: tuple[str, ...] = ()

    @property
    def host_bytes(self) -> int:
        """The maximum for activations, row statistics and indexes, when all buffers wait for the store: in flight, in
        buffers, and encoded for the store. Freed memory that the C library's allocator keeps is not included."""
        steps = self.inflight_steps * (self.step_bytes + self.step_statistics_bytes)
        buffers = self.host_buffers * (self.block_bytes + self.block_statistics_bytes)
        return steps + buffers + self.encoded_blocks * self.block_bytes + self.index_bytes


def plan_host_memory(
    config: RunConfig, step: StepSpec, mesh: MeshPlan, rows_per_block: int, topology: Topology
) -> HostMemoryPlan:
    """Plans buffers and steps in flight: fewer if they would exceed the host's memory. Raises ConfigError if a step
    exceeds run.max_inflight_mib, or one step and the blocks exceed the host's memory."""
    process_rows = mesh.process_rows
    step_bytes, block_bytes = process_rows * step.row_bytes, rows_per_block * step.row_bytes
    # What may be set if rows are too large: a step has at least a row for each device, or group of devices.
    fewer = "lower batch.rows" if step.rows > mesh.data else "capture fewer layers or sites"
    inflight_steps = _inflight_steps(config.run.max_inflight_mib, step_bytes, topology, fewer)
    host_buffers = _host_buffers(config.store, len(step.keys), block_bytes, topology.host_memory)
    plan = HostMemoryPlan(
        step_bytes=step_bytes,
        step_statistics_bytes=process_rows * step.row_statistics_bytes,
        inflight_steps=inflight_steps,
        block_bytes=block_bytes,
        block_statistics_bytes=rows_per_block * step.row_statistics_bytes,
        host_buffers=host_buffers,
        index_bytes=_index_bytes(step, rows_per_block, host_buffers),
        encoded_blocks=0 if is_plain_files(config.store.path, config.store.compression) else host_buffers,
        notes=(_NO_OVERLAP,) if inflight_steps == 1 and not topology.few_cores else (),
    )
    needed = plan.host_bytes
    while topology.host_memory is not None and plan.host_bytes > topology.host_memory and plan.inflight_steps > 1:
        note = (
            f"{inflight_steps} steps in flight would take {needed / MIB:.0f} MiB on this host, which has "
            f"{topology.host_memory / MIB:.0f} MiB: {plan.inflight_steps - 1} are in flight"
        )
        plan = replace(plan, inflight_steps=plan.inflight_steps - 1, notes=(note,))
    if topology.host_memory is not None and plan.host_bytes > topology.host_memory:
        block_setting = "store.shard_mib" if config.store.rows_per_block is None else "store.rows_per_block"
        raise ConfigError(
            f"activations would take {plan.host_bytes / MIB:.0f} MiB on this host, which has "
            f"{topology.host_memory / MIB:.0f} MiB: a step of "
            f"{(step_bytes + plan.step_statistics_bytes) / MIB:.0f} MiB, and {plan.host_buffers} blocks of "
            f"{plan.block_bytes / MIB:.0f} MiB. "
            + (f"Lower {block_setting}, or {fewer}." if rows_per_block > process_rows else f"{fewer.capitalize()}.")
        )
    return plan


def _host_buffers(store: StoreConfig, num_arrays: int, block_bytes: int, host_memory: int | None) -> int:
    """The number of blocks that are filled or written at the same time. For object storage, enough for its concurrent
    requests, since a single upload is slow, within a share of the host's memory (each block is also encoded). Buffers
    that are not needed are never touched."""
    if host_memory is None or not store.path.startswith(("gs://", "s3://")):
        return MIN_HOST_BUFFERS
    wanted = 1 + -(-_REMOTE_REQUESTS // max(1, num_arrays))
    return max(MIN_HOST_BUFFERS, min(wanted, host_memory // _BUFFERS_SHARE // (2 * block_bytes)))


def _index_bytes(step: StepSpec, rows_per_block: int, host_buffers: int) -> int:
    """Bytes for statistics and indexes of features: sorting, for a few SAEs at a time, running statistics, and the
    indexes until they are stored."""
    tops = sorted(encoder.top for encoder in step.encoders if encoder.indexed or step.statistics)
    sorting = _SORTING_BYTES * sum(tops[-MAX_SORTING_THREADS:])
    stored = sum(encoder.index_bytes for encoder in step.encoders)
    entries = sum(encoder.sae.width * ENTRY.itemsize for encoder in step.encoders if encoder.indexed)
    running = sum(encoder.sae.width * _RUNNING_BYTES for encoder in step.encoders) if step.statistics else 0
    # An index is in memory twice while it is written.
    indexes = 2 * host_buffers * (rows_per_block * step.slots * stored + entries)
    return rows_per_block * step.slots * sorting + indexes + RUNNING_KEPT * running


def plan_rows_per_block(
    store: StoreConfig, step: StepSpec, process_rows: int, stream_tokens: int | None, stored: int | None
) -> int:
    """Rows per block: `stored` for an existing store, else store.rows_per_block, else a number of whole steps that
    makes about store.shard_mib in the largest array, or fewer if a stream's `stream_tokens` (None: all of its data)
    would have less than MIN_BLOCKS_PER_STREAM blocks.

    Raises ConfigError if a process's rows per step do not divide the number, or if the store was made with a number
    other than store.rows_per_block.
    """
    wanted = store.rows_per_block
    if stored is not None and wanted not in (None, stored):
        raise ConfigError(
            f"store.rows_per_block is {wanted}, but the store has {stored} rows per block. Remove the setting, or "
            "choose another store.path."
        )
    rows = wanted if stored is None else stored
    if rows is None:
        most = MAX_STEPS_PER_BLOCK
        if stream_tokens is not None:
            most = min(most, stream_tokens // (MIN_BLOCKS_PER_STREAM * process_rows * step.length))
        return rows_per_block_for(store.shard_mib, step.largest_row_bytes, process_rows, max(1, most))
    if rows % process_rows:
        multiple = -(-rows // process_rows) * process_rows
        other = f"store.rows_per_block to {multiple}" if stored is None else "another store.path"
        raise ConfigError(
            f"batch.rows = {step.rows} is {process_rows} per process, which does not divide the {rows} rows per block. "
            f"Set batch.rows so that the rows per process divide {rows}, or set {other}."
        )
    return rows


def plan_shard_bytes(store: StoreConfig, step: StepSpec, rows_per_block: int) -> int | None:
    """The size of store shards if an array's blocks are larger, so that each is divided; else None."""
    largest = max(LARGEST_SHARD_BYTES, int(store.shard_mib * MIB))
    return largest if rows_per_block * step.largest_row_bytes > largest else None


def _inflight_steps(max_inflight_mib: float, step_bytes: int, topology: Topology, fewer: str) -> int:
    """As many as `max_inflight_mib` allows; one if the host has few cores, which cannot compute and copy at the same
    time. fewer: how to make a step smaller, for a message."""
    most = 1 if topology.few_cores else MAX_STEPS_IN_FLIGHT
    steps = min(most, int(max_inflight_mib * MIB) // step_bytes)
    if steps < 1:
        raise ConfigError(
            f"run.max_inflight_mib is {max_inflight_mib:g}, but a step's activations take {step_bytes / MIB:.1f} MiB. "
            f"Set it to at least {math.ceil(min(most, 2) * step_bytes / MIB)}, or {fewer}."
        )
    return steps
