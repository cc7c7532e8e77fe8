"""How many neighbours divide the experts of a layer and exchange tokens (`models/exchange/tokens.py`), with fsdp.

In a group of g devices, each gathers 1/g of a layer's experts, and sends each token to the device that has its expert.
Gathered weights are passed on from neighbour to neighbour, but a token that is sent to a distant device occupies every
link on the way. So its bytes count once per link: 2/3 of the side of a square of g devices, which is the mean distance.
GPUs are connected by switches: all are neighbours.
"""

import math
from dataclasses import replace

import jax

from pipeline.models.architecture import Architecture
from pipeline.models.checkpoints.loading import WeightBytes

_MIN_SAVING = 0.2  # of the bytes; sorting and the exchange's rounds take time, too


def pair_bytes(arch: Architecture, num_tokens: int, item_bytes: int) -> int:
    """Bytes per layer of the pairs of a token and one of its experts, both ways. 0 for a model without experts."""
    return 0 if arch.experts is None else 2 * num_tokens * arch.experts.per_token * arch.d_model * item_bytes


def choose_group(weights: WeightBytes, data: int, tensor: int, num_bytes: int, on_gpus: bool) -> int:
    """The group whose devices receive the fewest bytes, if it saves enough; 1: they gather all experts of a layer.

    data, tensor: devices along these axes; num_bytes: the `pair_bytes` of a device.
    """
    experts = _experts(weights).leaves
    if not experts or num_bytes == 0:
        return 1
    most = math.gcd(data, *(leaf.layer_shape[0] // tensor for leaf in experts))
    groups = [group for group in range(1, most + 1) if most % group == 0]
    received = {group: received_bytes(weights, data, tensor, num_bytes, group, on_gpus) for group in groups}
    best = min(received, key=received.__getitem__)
    return best if received[best] <= (1 - _MIN_SAVING) * received[1] else 1


def used_bytes(weights: WeightBytes, tensor: int, group: int) -> int:
    """Bytes of weights that a device computes with in a step."""
    return weights.on_device(tensor) - _experts(weights).on_device(tensor) * (group - 1) // group


def gathered_bytes(weights: WeightBytes, data: int, tensor: int, group: int) -> int:
    """Bytes of weights that a device receives in a step with fsdp."""
    return used_bytes(weights, tensor, group) - weights.on_device(tensor, data, group)


def received_bytes(weights: WeightBytes, data: int, tensor: int, num_bytes: int, group: int, on_gpus: bool) -> float:
    """Bytes that a device receives in a step for the layers' experts, counted once per link."""
    experts = _experts(weights)
    exchanged = exchanged_bytes(weights, tensor, num_bytes, group, on_gpus)
    return experts.on_device(tensor) * (1 / group - 1 / data) + exchanged


def exchanged_bytes(weights: WeightBytes, tensor: int, num_bytes: int, group: int, on_gpus: bool) -> float:
    """Bytes of tokens that a device receives in a step, counted once per link."""
    num_layers = sum(leaf.num_layers for leaf in _experts(weights).leaves if leaf.key == "mlp.experts_down")
    links = 1.0 if on_gpus else max(1.0, 2 / 3 * math.sqrt(group))
    return num_layers * num_bytes / tensor * (1 - 1 / group) * links


def _experts(weights: WeightBytes) -> WeightBytes:
    """The matrices of the layers' experts."""
    leaves = jax.tree.leaves(weights.leaves)
    experts = [leaf for leaf in leaves if leaf.is_matrix and "E" in leaf.spec.logical_axes]
    return replace(weights, leaves=experts, others=0)
