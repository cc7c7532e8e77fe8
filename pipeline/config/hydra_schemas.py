"""Registers the schemas with Hydra."""

import re
from decimal import Decimal
from functools import cache
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import AnyNode, BooleanNode, DictConfig, IntegerNode, ListConfig, OmegaConf, StringNode, ValueNode
from omegaconf.errors import ValidationError

from pipeline.config.schema import ArcData, DataConfig, GenerateData, HfData, ParquetData, RunConfig

_MULTIPLES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def _copy(node: ValueNode, memo: dict[int, Any]) -> ValueNode:
    copied = type(node)()
    node._deepcopy_impl(copied, memo)
    return copied


class _Boolean(BooleanNode):
    """A boolean that refuses all numbers except 0 and 1. OmegaConf would accept them as true."""

    __deepcopy__ = _copy

    def _validate_and_convert_impl(self, value: Any) -> bool:
        try:
            is_other_number = int(value) not in (0, 1)
        except (TypeError, ValueError, OverflowError):
            is_other_number = False
        if is_other_number:
            raise ValidationError("Value '$VALUE' is not a valid bool")
        return super()._validate_and_convert_impl(value)


class _Integer(IntegerNode):
    """A whole number, which may be written as 1e9. `run.max_tokens` may also be written as 10k, 500M or 1.5B."""

    __deepcopy__ = _copy

    def _validate_and_convert_impl(self, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        counted = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([kmbt]?)", value, re.I) if isinstance(value, str) else None
        if counted and self._key() == "max_tokens":
            value = int(Decimal(counted[1]) * _MULTIPLES[counted[2].lower()])
        return super()._validate_and_convert_impl(value)


def _prepared(node: DictConfig) -> DictConfig:
    """Makes a config of frozen dataclasses writable, so that Hydra can merge into it, and its booleans strict. Strings
    keep the type that they are given as: OmegaConf would make text of a number, with other digits, e.g. of 2024_10."""
    node._set_flag("readonly", None)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not (child._is_missing() or child._is_none()):
            _prepared(child)
        elif isinstance(child, ListConfig):
            child._metadata.element_type = Any
        elif type(child) is StringNode:
            node.__dict__["_content"][key] = AnyNode(child._value(), key, node)
        elif type(child) in (BooleanNode, IntegerNode):
            cls = _Boolean if type(child) is BooleanNode else _Integer
            node._set_item_impl(key, cls(child._value(), key, node, is_optional=child._is_optional()))
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
