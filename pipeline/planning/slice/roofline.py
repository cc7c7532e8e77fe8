"""How fast a job can be on a TPU slice: four limits, of which the lowest binds.

Rates count valid tokens. Rows are computed and stored with their padding, so a token costs 1 / fill slots.
"""

from dataclasses import dataclass

from pipeline.planning.slice.chips import Slice
from pipeline.store.format.layout import SIDE_BYTES

BUCKET_WRITES_PER_S = 1000  # initial limit of a Cloud Storage bucket (cloud.google.com/storage/docs/request-rate)
HOST_MEMORY_PASSES = 6  # DMA writes; the block's buffer: read, write; the encoded shard: read, write; the socket reads


@dataclass(frozen=True)
class Cost:
    """The cost of a token slot."""

    flops: int
    activation_bytes: float  # copied from the device, and stored
    fill: float  # the fraction of slots that hold a valid token

    @property
    def stored_bytes(self) -> float:
        """Per valid token, in the store."""
        return (self.activation_bytes + SIDE_BYTES) / self.fill


@dataclass(frozen=True)
class Limits:
    """Valid tokens per second that each part of the system could process if the others were infinitely fast."""

    compute: float
    device_to_host: float
    network: float
    store: float

    @property
    def binding(self) -> str:
        """The name of the lowest limit."""
        return min(vars(self), key=vars(self).__getitem__)

    @property
    def tokens_per_s(self) -> float:
        return min(vars(self).values())


def throughput_limits(cost: Cost, tpu_slice: Slice, mfu: float, store_bytes_per_s: float) -> Limits:
    """`mfu` is the fraction of the chips' peak FLOPs that the forward pass reaches."""
    chip, num_chips = tpu_slice.chip, tpu_slice.num_chips
    return Limits(
        compute=num_chips * chip.flops_per_s * mfu * cost.fill / cost.flops,
        device_to_host=num_chips * chip.host_bytes_per_s * cost.fill / cost.activation_bytes,
        network=num_chips * chip.network_bytes_per_s / cost.stored_bytes,
        store=store_bytes_per_s / cost.stored_bytes,
    )


@dataclass(frozen=True)
class Traffic:
    """Bytes per second: from all devices, through one host's memory, and from one host to the store."""

    device_to_host: float
    host_memory: float
    network: float


def traffic(cost: Cost, tpu_slice: Slice, tokens_per_s: float) -> Traffic:
    device_to_host = tokens_per_s * cost.activation_bytes / cost.fill
    return Traffic(
        device_to_host=device_to_host,
        host_memory=HOST_MEMORY_PASSES * device_to_host / tpu_slice.num_hosts,
        network=tokens_per_s * cost.stored_bytes / tpu_slice.num_hosts,
    )


@dataclass(frozen=True)
class Bill:
    """The time and money that a number of tokens takes."""

    hours: float
    terabytes: float
    chips_usd: float
    store_usd_per_month: float


def bill(
    cost: Cost,
    tpu_slice: Slice,
    num_tokens: int,
    tokens_per_s: float,
    usd_per_chip_hour: float,
    usd_per_tb_month: float,
) -> Bill:
    hours = num_tokens / tokens_per_s / 3600
    terabytes = num_tokens * cost.stored_bytes / 1e12
    return Bill(hours, terabytes, hours * tpu_slice.num_chips * usd_per_chip_hour, terabytes * usd_per_tb_month)
