"""Advice on settings that make a job on a TPU slice slow or expensive."""

from collections.abc import Iterator

from pipeline.config.schema import RunConfig
from pipeline.core.counts import counted
from pipeline.data.sources import num_named_files
from pipeline.models.architecture import Architecture
from pipeline.planning.slice.chips import Slice
from pipeline.planning.slice.roofline import Limits
from pipeline.store.format.layout import ITEM_BYTES, MIB

_MIN_REMOTE_SHARD = 64 * MIB


_MAX_READING = 1 / 8  # time to read the weights in a step, as a share of the time to compute


def advise(
    config: RunConfig,
    arch: Architecture,
    tpu_slice: Slice,
    limits: Limits,
    mfu: float,
    shard_bytes: int,
    tokens_per_chip: int,
) -> Iterator[str]:
    """A sentence for each setting that should be changed.

    `shard_bytes` is the size of the largest store shard, `tokens_per_chip` the tokens of a step on one chip.
    """
    yield from _advise_on_data(config, tpu_slice.num_hosts)
    is_of_shard_mib = 2 * shard_bytes > config.store.shard_mib * MIB  # and not smaller for a small run.max_tokens
    if "://" in config.store.path and shard_bytes < _MIN_REMOTE_SHARD and is_of_shard_mib:
        yield (
            f"store shards of {shard_bytes / MIB:.0f} MiB are small for object storage; raise store.shard_mib to "
            f"{_MIN_REMOTE_SHARD // MIB}-512"
        )
    critical_tokens = tpu_slice.chip.critical_tokens
    if arch.experts is not None:  # an expert's weights are read for its own tokens only
        critical_tokens *= arch.experts.num_experts / arch.experts.per_token
    reading = critical_tokens / tokens_per_chip * mfu  # as a share of the time to compute
    if reading > _MAX_READING:
        yield (
            f"with {tokens_per_chip} tokens per chip and step, reading the weights takes {reading:.0%} of the time to "
            f"compute at {mfu:.0%} of the peak (plan.mfu), which may therefore be too high; raise batch.rows to reach "
            f"at least about {critical_tokens * mfu / _MAX_READING:.0f} tokens"
        )
    yield from _advise_on_limits(config, limits)


def _advise_on_data(config: RunConfig, num_hosts: int) -> Iterator[str]:
    num_files = num_named_files(config.data)
    if num_files is not None and num_files < num_hosts:
        yield (
            f"{counted(num_files, 'source shard')} (the files of the data) can give at most "
            f"{counted(num_files, 'stream')}, so {num_hosts - num_files} of {num_hosts} hosts have no work; divide the "
            f"data into at least {num_hosts} files, or parquet files by data.row_groups_per_shard"
        )


def _advise_on_limits(config: RunConfig, limits: Limits) -> Iterator[str]:
    if limits.binding == "interconnect":
        yield (
            f"exchanging weights or activations between chips takes {limits.compute / limits.tokens_per_s:.1f} times "
            f"as long as computing; raise batch.rows if weights are gathered (fsdp), lower mesh.tensor if it is more "
            f"than 1, or use larger chips"
        )
    elif limits.binding != "compute":
        yield (
            f"{limits.binding.replace('_', ' ')} limits this job to {limits.tokens_per_s / limits.compute:.0%} of what "
            f"the chips could compute: capture fewer layers or sites, fewer tokens (capture.positions), or use fewer "
            f"chips"
        )
        item_bytes = ITEM_BYTES[config.capture.dtype]
        if item_bytes > 1 and not config.capture.encode:
            share = (1 + ITEM_BYTES["float32"] / 64) / item_bytes
            yield f"capture.dtype=int8 capture.scale_group=64 would copy and store about {share:.0%} of the bytes"
