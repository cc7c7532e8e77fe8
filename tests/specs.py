"""Specifications of steps for tests."""

from collections.abc import Sequence

from pipeline.core.sites import ActivationKey, Site
from pipeline.models.architecture import Architecture
from pipeline.models.registry import Model
from pipeline.step.spec import StepSpec
from pipeline.store.format.layout import SELECTED, TOKENS, activation_spec

SPARSE_SITES = {Site.router_logits, Site.router_weights, Site.router_indices, Site.expert_out}
"""Sites that only sparse layers have."""

LLAMA = Architecture(
    num_layers=2,
    vocab_size=100,
    max_positions=4096,
    d_model=512,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    d_mlp=1024,
    norm_eps=1e-6,
    rope=None,
)


def step_spec(
    model: Model, keys: Sequence[ActivationKey], *, rows: int, length: int, dtype: str, **others: object
) -> StepSpec:
    """The specification of a step of `model` that captures `keys`. `others`: other fields of StepSpec."""
    slots = (TOKENS if others.get("selected") is None else SELECTED).slots
    activations = {
        key: activation_spec(key, model.hook_name(key), model.width(key, length), dtype, slots) for key in keys
    }
    return StepSpec(activations, rows=rows, length=length, dtype=dtype, **others)
