"""Specifications of steps, as tests need them."""

from collections.abc import Sequence

from pipeline.core.sites import ActivationKey
from pipeline.models.registry import Model
from pipeline.step.spec import StepSpec


def step_spec(
    model: Model, keys: Sequence[ActivationKey], *, rows: int, length: int, dtype: str, **others: object
) -> StepSpec:
    """Of a step of `model` that captures `keys`; `others` are StepSpec's other fields."""
    widths = tuple(model.width(key.site, length) for key in keys)
    return StepSpec(keys=tuple(keys), widths=widths, rows=rows, length=length, dtype=dtype, **others)
