"""How fast a job can be on a TPU slice or on GPUs: the limits of its parts, the lowest of which binds.

Rates count valid tokens. Rows are computed and stored with their padding, so a token costs 1 / fill slots.
"""

from dataclasses import dataclass

from pipeline.config.choices import Weights
from pipeline.models.architecture import Architecture
from pipeline.planning.expert_groups import exchanged_bytes, gathered_bytes
from pipeline.planning.mesh import WeightsPlan
from pipeline.planning.slice.chips import Chip, Slice
from pipeline.store.format.layout import SIDE_BYTES

BUCKET_WRITES_PER_S = 1000  # initial limit of a Cloud Storage bucket (cloud.google.com/storage/docs/request-rate)
# Reading, tokenising and packing: the least that `make bench-host` has measured (docs/performance.md: 815,000 on a
# faster host), and the share of that in the feed's own thread, where the tokenizer's threads do not help.
FEED_TOKENS_PER_CORE_S, FEED_SERIAL_SHARE = 316_000, 0.16
# Of a dense model's MFU. Few experts: Mixtral on v5p and v6e (maxtext.readthedocs.io, "Optimized models tiering").
# Many: DeepSeek-V3, Qwen3 and Gemma 4 have 26 to 27 % on TPU7x, gpt-oss 16 and dense models 39 to 55
# (github.com/AI-Hypercomputer/tpu-recipes, training/ironwood).
_FEW_EXPERTS, _FEW_EXPERTS_SHARE, _MANY_EXPERTS_SHARE = 16, 0.8, 0.5


@dataclass(frozen=True)
class Cost:
    """The cost of a token slot."""

    flops: int
    activation_bytes: float  # copied from the device, and stored
    fill: float  # the fraction of slots with a valid token
    received_bytes: float = 0.0  # by each device from others, divided by all slots of a step
    index_bytes: float = 0.0  # made on the host, and stored
    hbm_bytes: float = 0.0  # at least, read and written by all devices

    @property
    def stored_bytes(self) -> float:
        """Bytes in the store per valid token."""
        return (self.activation_bytes + self.index_bytes + SIDE_BYTES) / self.fill


def throughput_limits(cost: Cost, tpu_slice: Slice, mfu: float, store_bytes_per_s: float) -> dict[str, float]:
    """Valid tokens per second that each part of the system could process if all others were infinitely fast. `mfu` is
    the fraction of the chips' peak FLOPs that the forward pass reaches."""
    chip, num_chips = tpu_slice.chip, tpu_slice.num_chips
    limits = {
        "compute": num_chips * chip.flops_per_s * mfu * cost.fill / cost.flops,
        "device_to_host": num_chips * chip.host_bytes_per_s * cost.fill / cost.activation_bytes,
        "network": num_chips * chip.network_bytes_per_s / cost.stored_bytes,
        "store": store_bytes_per_s / cost.stored_bytes,
    }
    if cost.hbm_bytes:
        limits["hbm"] = num_chips * chip.hbm_bytes_per_s * cost.fill / cost.hbm_bytes
    if cost.received_bytes:
        limits["interconnect"] = tpu_slice.interconnect_bytes_per_s * cost.fill / cost.received_bytes
    return limits


def feed_tokens_per_s(processes: int, cores: float) -> float:
    """Tokens per second that processes with `cores` each read, tokenise and pack."""
    return processes * FEED_TOKENS_PER_CORE_S / (FEED_SERIAL_SHARE + (1 - FEED_SERIAL_SHARE) / cores)


def forward_mfu(chip: Chip, arch: Architecture, flops: float, attention_flops: float) -> float:
    """The model FLOPs utilisation to expect of a forward pass, of which `attention_flops` are in attention kernels."""
    mfu = chip.mfu
    if arch.experts is not None:
        mfu *= _FEW_EXPERTS_SHARE if arch.experts.num_experts <= _FEW_EXPERTS else _MANY_EXPERTS_SHARE
    attention_mfu = chip.attention_mfu * min(1, arch.head_dim / chip.mxu_size)
    return flops / ((flops - attention_flops) / mfu + attention_flops / attention_mfu) if flops else mfu


def decoding_step_s(hbm_bytes: int, received_bytes: int, tpu_slice: Slice) -> float:
    """Seconds of a decoding step. It computes little, so its time is limited by the bytes that each device reads from
    its memory, or receives from others."""
    receiving_s = received_bytes / tpu_slice.interconnect_bytes_per_s if received_bytes else 0.0
    return max(hbm_bytes * tpu_slice.chip.devices_per_chip / tpu_slice.chip.hbm_bytes_per_s, receiving_s)


def received_bytes(plan: WeightsPlan, data: int, summed: int, num_pair_bytes: int) -> int:
    """Bytes that a device receives from others in a step: with fsdp, the parts of matrices that it does not hold,
    and the tokens of its experts; along `tensor`, all-reduces of `summed` bytes of activations."""
    received = 0
    if plan.sharding is Weights.fsdp:
        received = gathered_bytes(plan.needed, data, plan.tensor, plan.expert_group)
        received += round(exchanged_bytes(plan.needed, plan.tensor, num_pair_bytes, plan.expert_group, plan.on_gpus))
    return received + 2 * summed * (plan.tensor - 1) // plan.tensor
