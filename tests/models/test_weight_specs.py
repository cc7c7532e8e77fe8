"""Consequences of each weight's description: int8, division along `tensor`, and which layers have it."""

from dataclasses import replace

import pytest

from pipeline.models.architecture import DeltaNet, Experts, GlobalHeads, Part, SharedKeys, ShortConv
from pipeline.models.weight_specs import TENSOR_AXES, WEIGHTS, WeightKind, weight_spec
from tests.specs import LLAMA

DIVIDED_AXIS = {
    "attention.qkv": 0,
    "attention.q": 0,
    "attention.k": 0,
    "attention.v": 0,
    "attention.q_up": 0,
    "attention.kv_up": 0,
    "attention.sinks": 0,
    "attention.gate": 0,
    "attention.o": 1,
    "delta.q": 0,
    "delta.k": 0,
    "delta.v": 0,
    "delta.z": 0,
    "delta.o": 1,
    "conv.in_gate": 0,
    "conv.in": 0,
    "conv.out_gate": 0,
    "conv.o": 1,
    "mlp.gate": 0,
    "mlp.up": 0,
    "mlp.down": 1,
    "mlp.experts_gate": 0,
    "mlp.experts_up": 0,
    "mlp.experts_down": 0,
    "mlp.shared_gate": 0,
    "mlp.shared_up": 0,
    "mlp.shared_down": 1,
}
UNDIVIDED = {"attention.q_down", "attention.kv_down", "attention.k_rotary", "mlp.input_gate", "mlp.input_out"}
NUM_INPUTS = {key: 1 for key in (*DIVIDED_AXIS, *UNDIVIDED) if key != "attention.sinks"} | {
    "attention.o": 2,
    "delta.o": 3,
}
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


def test_only_matrices_of_layers_are_divided_and_quantised() -> None:
    matrices = {key: spec for key, spec in WEIGHTS.items() if spec.kind is WeightKind.matrix}
    divided = {
        key: [axis in TENSOR_AXES for axis in spec.logical_axes].index(True)
        for key, spec in matrices.items()
        if TENSOR_AXES.keys() & {*spec.logical_axes}
    }
    assert divided == DIVIDED_AXIS
    assert matrices.keys() - divided.keys() == UNDIVIDED
    assert {key: spec.num_inputs for key, spec in WEIGHTS.items() if spec.num_inputs} == NUM_INPUTS


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
