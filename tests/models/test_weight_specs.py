"""Consequences of each weight's description: division along `tensor`, its bias's shape, and which layers have it."""

from dataclasses import replace

import pytest

from pipeline.models.architecture import DeltaNet, Experts, GlobalHeads, Part, SharedKeys, ShortConv
from pipeline.models.weight_specs import TENSOR_AXES, WEIGHTS, WeightKind, weight_spec
from tests.specs import LLAMA

ATTENTION = {Part.attention, Part.keys, Part.values}
KEYS_AS_VALUES = GlobalHeads(head_dim=64, num_kv_heads=1, keys_are_values=True)
PARTS = [  # fields of an architecture, and the parts of its last layer beside Part.layer
    ({}, ATTENTION | {Part.dense}),
    ({"experts": Experts("DS", 4, 2, 8, False)}, ATTENTION | {Part.sparse}),
    ({"experts": Experts("SD", 4, 2, 8, False)}, ATTENTION | {Part.dense}),
    ({"experts": Experts("DS", 4, 2, 8, False, beside_mlp=True)}, ATTENTION | {Part.dense, Part.sparse}),
    ({"experts": Experts("SD", 4, 2, 8, False, beside_mlp=True)}, ATTENTION | {Part.dense}),
    ({"delta": DeltaNet("AD", 2, 2, 8, 8, 4)}, {Part.delta, Part.dense}),
    ({"conv": ShortConv("AC", 3)}, {Part.conv, Part.dense}),
    ({"shared_keys": SharedKeys(1, 64)}, {Part.attention, Part.dense}),
    ({"global_heads": KEYS_AS_VALUES}, {Part.attention, Part.keys, Part.dense}),
    ({"global_heads": KEYS_AS_VALUES, "shared_keys": SharedKeys(1, 64)}, {Part.attention, Part.dense}),
]


def test_all_matrices_but_the_small_ones_are_divided() -> None:
    """`test_mesh.py` computes with divided weights, but few undivided ones would not change what it measures."""
    matrices = {key: {*spec.logical_axes} for key, spec in WEIGHTS.items() if spec.kind is WeightKind.matrix}
    small = {"attention.q_down", "attention.kv_down", "attention.k_rotary", "mlp.input_gate", "mlp.input_out"}
    assert {key for key, axes in matrices.items() if not axes & TENSOR_AXES.keys()} == small


@pytest.mark.parametrize("key", [key for key, spec in WEIGHTS.items() if spec.kind is not WeightKind.embedding])
def test_a_bias_has_the_outputs_of_its_weight(key: str) -> None:
    weight, bias = WEIGHTS[key], weight_spec(f"{key}_bias")
    num_outputs = len(weight.axes.partition(" ")[0])
    assert bias.logical_axes == weight.logical_axes[:num_outputs]
    assert (bias.num_inputs, bias.is_scale, bias.part) == (0, False, weight.part)


def test_an_unknown_weight_raises_key_error() -> None:
    with pytest.raises(KeyError, match="attention.query"):
        weight_spec("attention.query_bias")


@pytest.mark.parametrize(("fields", "parts"), PARTS)
def test_a_layer_has_the_parts_of_its_kind(fields: dict, parts: set[Part]) -> None:
    assert replace(LLAMA, **fields).kind(1).parts == parts | {Part.layer}
