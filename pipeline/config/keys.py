"""The dotted keys of the configuration."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from pipeline.config.schema import ArcData, GenerateData, HfData, ParquetData, RunConfig
from pipeline.core.suggestions import did_you_mean


def key_remedy(key: str) -> str:
    """The remedy for an unknown key, starting with a space: the most similar key, and how to list all keys."""
    keys = list(all_keys())
    another = " It belongs to another choice of data." if key in keys else did_you_mean(key, keys, cutoff=0.8)
    return f"{another} --cfg job prints all keys."


def all_keys(cls: type = RunConfig, prefix: str = "") -> Iterator[str]:
    """The dotted keys of the schema, including those of every data source."""
    groups = (ParquetData, ArcData, HfData, GenerateData)
    for key in fields(cls):
        if prefix + key.name == "data":
            for group in groups:
                yield from all_keys(group, "data.")
        elif is_dataclass(key.type):
            yield from all_keys(key.type, f"{prefix}{key.name}.")
        else:
            yield prefix + key.name
