"""The dotted keys of the configuration."""

import difflib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from pipeline.config.schema import ArcData, GenerateData, HfData, ParquetData, RunConfig


def key_remedy(key: str) -> str:
    """The remedy for an unknown key: the most similar key, and how to list all keys."""
    keys = list(all_keys(RunConfig))
    similar = "" if key in keys else next(iter(difflib.get_close_matches(key, keys, n=1, cutoff=0.8)), "")
    another = "Another choice of data has it. " if key in keys else f"Did you mean {similar}? " if similar else ""
    return f"{another}--cfg job prints all keys."


def all_keys(cls: type = RunConfig, prefix: str = "") -> Iterator[str]:
    """The dotted keys of the schema, including the keys of every data source."""
    groups = (ParquetData, ArcData, HfData, GenerateData)
    for key in fields(cls):
        if prefix + key.name == "data":
            for group in groups:
                yield from all_keys(group, "data.")
        elif is_dataclass(key.type):
            yield from all_keys(key.type, f"{prefix}{key.name}.")
        else:
            yield prefix + key.name
