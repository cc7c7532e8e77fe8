"""Consequences of each weight's description: int8, division along `tensor`, and the steps that a site requires."""

from dataclasses import replace

import pytest

from pipeline.config.composing import PACKAGE
from pipeline.core.sites import Site
from pipeline.models.architecture import LayerBlocks
from pipeline.models.registry import open_model
from pipeline.models.weight_specs import TENSOR_AXES, WEIGHTS, Kind, Step, layer_steps, required_steps, weight_spec

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
ATTENTION = {Step.attn_in, Step.q, Step.k, Step.v, Step.z, Step.o}
MLP = {Step.mlp_in, Step.gate, Step.up, Step.neurons, Step.down}
DENSE, SPARSE = (LayerBlocks(is_delta=False, is_sparse=is_sparse) for is_sparse in (False, True))
DELTA = LayerBlocks(is_delta=True, is_sparse=False)
ARCH = open_model(str(PACKAGE / "assets" / "tiny-qwen2")).arch
STEPS = {
    Site.attn_in: {Step.attn_in},
    Site.q: {Step.attn_in, Step.q},
    Site.v: {Step.attn_in, Step.v},
    Site.attn_entropy: {Step.attn_in, Step.q, Step.k, Step.scores},
    Site.attn_pattern: {Step.attn_in, Step.q, Step.k, Step.scores},
    Site.attn_z: ATTENTION - {Step.o},
    Site.head_out: ATTENTION - {Step.o} | {Step.heads},
    Site.attn_out: ATTENTION,
    Site.resid_mid: ATTENTION,
    Site.mlp_in: ATTENTION | {Step.mlp_in},
    Site.mlp_pre: ATTENTION | {Step.mlp_in, Step.gate},
    Site.mlp_pre_linear: ATTENTION | {Step.mlp_in, Step.up},
    Site.mlp_post: ATTENTION | MLP - {Step.down},
    Site.mlp_out: ATTENTION | MLP,
}
SPARSE_STEPS = {
    Site.v: {Step.attn_in, Step.v},
    Site.mlp_in: ATTENTION | {Step.mlp_in},
    Site.router_logits: ATTENTION | {Step.mlp_in, Step.router},
    Site.router_weights: ATTENTION | {Step.mlp_in, Step.router},
    Site.router_indices: ATTENTION | {Step.mlp_in, Step.router},
    Site.expert_out: ATTENTION | {Step.mlp_in, Step.router, Step.experts},
    Site.mlp_out: ATTENTION | {Step.mlp_in, Step.router, Step.experts, Step.shared, Step.mix},
}


def test_only_matrices_of_layers_are_divided_and_quantised() -> None:
    matrices = {key: spec for key, spec in WEIGHTS.items() if spec.kind is Kind.matrix}
    divided = {
        key: [axis in TENSOR_AXES for axis in spec.logical_axes].index(True)
        for key, spec in matrices.items()
        if spec.is_divided
    }
    assert divided == DIVIDED_AXIS
    assert matrices.keys() - divided.keys() == UNDIVIDED
    assert {key: spec.num_inputs for key, spec in WEIGHTS.items() if spec.num_inputs} == NUM_INPUTS


@pytest.mark.parametrize("key", [key for key, spec in WEIGHTS.items() if spec.kind is not Kind.embedding])
def test_a_bias_has_the_outputs_of_its_weight(key: str) -> None:
    weight, bias = WEIGHTS[key], weight_spec(f"{key}_bias")
    num_outputs = len(weight.axes.partition(" ")[0])
    assert bias.logical_axes == weight.logical_axes[:num_outputs]
    assert (bias.num_inputs, bias.is_scale, bias.steps) == (0, False, weight.steps)


def test_an_unknown_weight_raises_key_error() -> None:
    with pytest.raises(KeyError, match="attention.query"):
        weight_spec("attention.query_bias")


@pytest.mark.parametrize("site", STEPS)
def test_a_site_requires_only_its_steps(site: Site) -> None:
    assert required_steps({site}, ARCH, DENSE) == STEPS[site]
    assert required_steps({site}, replace(ARCH, parallel=True), DENSE) == (STEPS[site] & MLP or STEPS[site])


@pytest.mark.parametrize("site", SPARSE_STEPS)
def test_a_site_of_a_sparse_layer_requires_only_its_steps(site: Site) -> None:
    assert required_steps({site}, ARCH, SPARSE) == SPARSE_STEPS[site]


def test_a_delta_net_takes_the_place_of_attention() -> None:
    delta = {Step.attn_in, Step.delta}
    steps = {Site.attn_in: {Step.attn_in}, Site.attn_out: delta, Site.resid_mid: delta, Site.mlp_out: delta | MLP}
    assert {site: required_steps({site}, ARCH, DELTA) for site in steps} == steps
    assert required_steps({Site.q, Site.attn_entropy, Site.head_out}, ARCH, DELTA) == frozenset()


def test_several_sites_require_the_steps_of_each() -> None:
    assert required_steps({Site.k, Site.mlp_out}, replace(ARCH, parallel=True), DENSE) == {Step.attn_in, Step.k} | MLP
    sites = {Site.mlp_out, Site.attn_entropy, Site.head_out}
    assert required_steps(sites, ARCH, DENSE) == layer_steps(DENSE).keys() - {Step.layer_out}


def test_steps_after_an_mlp_are_computed_for_whole_layers_only() -> None:
    assert Step.layer_out in layer_steps(DENSE)
    assert not any(Step.layer_out in required_steps({site}, ARCH, DENSE) for site in Site)


def test_a_layer_that_shares_the_keys_of_another_computes_none() -> None:
    blocks = DENSE._replace(keys_of=1)
    assert required_steps({Site.attn_z, Site.attn_entropy}, ARCH, blocks) == {Step.attn_in, Step.q, Step.scores, Step.z}
    assert required_steps({Site.k, Site.v}, ARCH, blocks) == frozenset()
    values = DENSE._replace(has_global_heads=True, keys_are_values=True)
    assert required_steps({Site.v}, ARCH, values) == {Step.attn_in, Step.k, Step.keys_as_values}
    assert Step.v not in required_steps({Site.mlp_out}, ARCH, values)


def test_a_layer_with_experts_and_an_mlp_requires_the_steps_of_both() -> None:
    blocks = SPARSE._replace(has_both=True)
    assert required_steps({Site.mlp_post}, ARCH, blocks) == STEPS[Site.mlp_post]
    assert required_steps({Site.mlp_out}, ARCH, blocks) == ATTENTION | MLP | SPARSE_STEPS[Site.mlp_out]


def test_without_gate_the_pre_activation_is_the_up_projection() -> None:
    ungated = replace(ARCH, gated=False)
    assert required_steps({Site.mlp_pre}, ungated, DENSE) == ATTENTION | {Step.mlp_in, Step.gate, Step.up}
    assert required_steps({Site.mlp_out}, ungated, DENSE) == ATTENTION | MLP
