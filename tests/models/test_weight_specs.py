"""What follows from the description of each weight: int8, the division along `tensor`, and the steps of a site."""

import pytest

from pipeline.core.sites import Site
from pipeline.models.partition import TENSOR_AXES
from pipeline.models.weight_specs import LAYER_STEPS, WEIGHTS, Kind, Step, required_steps, weight_spec

DIVIDED_AXIS = {
    "attention.qkv": 0,
    "attention.q": 0,
    "attention.k": 0,
    "attention.v": 0,
    "attention.o": 1,
    "mlp.gate": 0,
    "mlp.up": 0,
    "mlp.down": 1,
}
NUM_INPUTS = dict.fromkeys(DIVIDED_AXIS, 1) | {"attention.o": 2}
ATTENTION = {Step.q, Step.k, Step.v, Step.z, Step.o}
STEPS = {
    Site.q: {Step.q},
    Site.v: {Step.v},
    Site.attn_z: ATTENTION - {Step.o},
    Site.attn_out: ATTENTION,
    Site.resid_mid: ATTENTION,
    Site.mlp_post: ATTENTION | {Step.up},
    Site.mlp_out: ATTENTION | {Step.up, Step.down},
}


def test_only_matrices_of_layers_are_divided_and_int8() -> None:
    matrices = {key: spec for key, spec in WEIGHTS.items() if spec.kind is Kind.matrix}
    divided = {key: [axis in TENSOR_AXES for axis in spec.logical_axes].index(True) for key, spec in matrices.items()}
    assert divided == DIVIDED_AXIS
    assert {key: spec.num_inputs for key, spec in WEIGHTS.items() if spec.num_inputs} == NUM_INPUTS


@pytest.mark.parametrize("key", [key for key, spec in WEIGHTS.items() if spec.kind is not Kind.embedding])
def test_a_bias_has_the_outputs_of_its_weight(key: str) -> None:
    weight, bias = WEIGHTS[key], weight_spec(f"{key}_bias")
    num_outputs = len(weight.logical_axes) - weight.num_inputs
    assert bias.logical_axes == weight.logical_axes[:num_outputs]
    assert (bias.num_inputs, bias.is_scale, bias.steps) == (0, False, weight.steps)


def test_another_name_is_an_error() -> None:
    with pytest.raises(KeyError, match="attention.query"):
        weight_spec("attention.query_bias")


@pytest.mark.parametrize("site", STEPS)
def test_steps_that_a_site_requires(site: Site) -> None:
    assert required_steps({site}, parallel=False) == STEPS[site]
    needs_mlp = STEPS[site] & {Step.up, Step.down}
    assert required_steps({site}, parallel=True) == (needs_mlp or STEPS[site])


def test_several_sites_require_the_steps_of_each() -> None:
    assert required_steps({Site.k, Site.mlp_out}, parallel=True) == {Step.k, Step.up, Step.down}
    assert required_steps({Site.mlp_out}, parallel=False) == LAYER_STEPS.keys()
