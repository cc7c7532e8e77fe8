"""What would make a job on a TPU slice faster or cheaper. Pure arithmetic."""

from collections.abc import Iterator

from pipeline.config.choices import Packing
from pipeline.config.schema import RunConfig
from pipeline.models.architecture import Architecture
from pipeline.planning.slice.chips import GIB, Chip
from pipeline.planning.slice.roofline import Limits
from pipeline.store.format.layout import ITEM_BYTES, MIB

_LANES = 128  # a TPU's matrices are laid out and multiplied in tiles of so many columns
_MIN_REMOTE_SHARD = 64 * MIB
_MAX_SHARD = 1024 * MIB


def advise(
    config: RunConfig,
    arch: Architecture,
    chip: Chip,
    reach: Limits,
    shard_bytes: int,
    host_bytes: int,
    tokens_per_chip: int,
) -> Iterator[str]:
    """One sentence for each choice that is poor."""
    if config.batch.packing is Packing.pad:
        yield "batch.packing=pad computes and stores every row's padding; batch.packing=pack fills 95 % of the slots"
    if "://" in config.store.path and shard_bytes < _MIN_REMOTE_SHARD:
        yield (
            f"store shards of {shard_bytes / MIB:.0f} MiB are small for object storage; raise store.shard_mib to "
            f"{_MIN_REMOTE_SHARD // MIB}-512"
        )
    if shard_bytes > _MAX_SHARD:
        yield (
            f"store shards of {shard_bytes / MIB:.0f} MiB are more than readers like: a block holds whole steps of a "
            f"process; lower batch.rows"
        )
    if host_bytes > chip.host_memory_bytes / 2:
        yield (
            f"activations may take {host_bytes / GIB:.0f} GiB of a host's {chip.host_memory_bytes / GIB:.0f}; lower "
            f"batch.rows or run.max_inflight_mib"
        )
    if tokens_per_chip < chip.critical_tokens:
        yield (
            f"{tokens_per_chip} tokens per chip and step take less time to compute than the weights to read, "
            f"which {chip.critical_tokens:.0f} would; raise batch.rows"
        )
    odd = [
        f"{name} {size}"
        for name, size in (
            ("model width", arch.d_model),
            ("MLP width", arch.d_mlp),
            ("heads' width", arch.num_heads * arch.head_dim),
        )
        if size % _LANES
    ]
    if odd:
        yield f"{', '.join(odd)}: no multiple of {_LANES}, so the products are padded and mfu will be lower"
    if reach.binding != "compute":
        yield (
            f"{reach.binding.replace('_', ' ')} limits this job to {reach.tokens_per_s / reach.compute:.0%} of what "
            f"the chips could compute: capture fewer layers or sites, fewer tokens (capture.positions), or take fewer "
            f"chips"
        )
        item_bytes = ITEM_BYTES[config.capture.dtype]
        if item_bytes > 1:
            yield f"capture.dtype=int8 would copy and store about {1 / item_bytes:.0%} of the bytes"
