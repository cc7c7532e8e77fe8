"""Registers the schemas with Hydra."""

from functools import cache
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import BooleanNode, DictConfig, OmegaConf
from omegaconf.errors import ValidationError

from pipeline.config.schema import ArcData, DataConfig, GenerateData, HfData, ParquetData, RunConfig


class _Boolean(BooleanNode):
    """A boolean that refuses all numbers except 0 and 1. OmegaConf would accept them as true."""

    def _validate_and_convert_impl(self, value: Any) -> bool:
        try:
            is_other_number = int(value) not in (0, 1)
        except (TypeError, ValueError, OverflowError):
            is_other_number = False
        if is_other_number:
            raise ValidationError("Value '$VALUE' is not a valid bool")
        return super()._validate_and_convert_impl(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Boolean":
        copied = _Boolean()
        self._deepcopy_impl(copied, memo)
        return copied


def _prepared(node: DictConfig) -> DictConfig:
    """Makes a config of frozen dataclasses writable, so that Hydra can merge into it, and its booleans strict."""
    node._set_flag("readonly", None)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not (child._is_missing() or child._is_none()):
            _prepared(child)
        elif type(child) is BooleanNode:
            node._set_item_impl(key, _Boolean(child._value(), key, node, is_optional=child._is_optional()))
    return node


def empty(data: type[DataConfig]) -> DictConfig:
    """A configuration of defaults, for data of this class."""
    return _prepared(OmegaConf.structured(RunConfig(data=data())))


@cache  # once is enough, since Hydra copies the nodes
def register() -> None:
    """Registers the schemas under the names in `defaults` of the YAML files."""
    store = ConfigStore.instance()
    store.store(name="schema", node=_prepared(OmegaConf.structured(RunConfig)))
    for name, cls in {"parquet": ParquetData, "arc": ArcData, "hf": HfData, "generate": GenerateData}.items():
        store.store(group="data", name=f"{name}_schema", node=_prepared(OmegaConf.structured(cls)))
