"""The dotted keys of the configuration."""

from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from functools import cache
from typing import get_args

from pipeline.config.schema import ArcData, GenerateData, HfData, ParquetData, RunConfig
from pipeline.core.suggestions import did_you_mean


def key_remedy(key: str) -> str:
    """The remedy for an unknown key, starting with a space: the most similar key, and how to list all keys."""
    keys = list(all_keys())
    another = " It belongs to another choice of data." if key in keys else did_you_mean(key, keys, cutoff=0.8)
    return f"{another} --cfg job prints all keys."


def all_keys() -> Iterator[str]:
    """The dotted keys of the schema, including those of every data source."""
    return (key for key, _ in all_fields())


@cache
def text_keys() -> frozenset[str]:
    """The keys whose values are text, or lists or mappings of text."""
    kinds = ((key, field.metadata.get("has_text"), (field.type, *get_args(field.type))) for key, field in all_fields())
    return frozenset(key for key, has_text, parts in kinds if has_text or str in parts or list[str] in parts)


def all_fields(cls: type = RunConfig, prefix: str = "") -> Iterator[tuple[str, Field]]:
    """Each dotted key with its field of the schema. Keys that several data sources have come several times."""
    groups = (ParquetData, ArcData, HfData, GenerateData)
    for key in fields(cls):
        if prefix + key.name == "data":
            for group in groups:
                yield from all_fields(group, "data.")
        elif is_dataclass(key.type):
            yield from all_fields(key.type, f"{prefix}{key.name}.")
        else:
            yield prefix + key.name, key
