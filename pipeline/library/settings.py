"""The options of an Extractor and of a Stream, as keys of the command's configuration."""

import operator
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields

from pipeline.config.composing import from_values
from pipeline.config.schema import BatchConfig, CaptureConfig, ModelConfig, ParquetData, RunConfig
from pipeline.core.errors import ConfigError
from pipeline.core.messages import did_you_mean, shown
from pipeline.core.sites import site_name
from pipeline.store.read.frameworks import parsed_dtype

_OPTIONS = {
    "model": {field.name for field in fields(ModelConfig)} - {"path", "dtype"},
    "data": {"on_error", "special_tokens", "prefix", "suffix", "template_kwargs", "date"},
    "batch": {field.name for field in fields(BatchConfig)},
    "capture": {field.name for field in fields(CaptureConfig)} - {"when", "seed", "statistics"},
    "store": {"shard_mib", "rows_per_block", "compression"},
    "mesh": {"tensor"},
    "run": {"reserved_mib"},
}
KEYS = {option: f"{section}.{option}" for section, options in _OPTIONS.items() for option in options}
KEYS |= {"model": "model.path", "model_dtype": "model.dtype", "sample_seed": "capture.seed"}
"""The key of the command's configuration that each option sets."""

_IN_MEMORY = {"store.path": "in-memory", "data.path": "in-memory"}  # required keys, which only `save` uses


def settings(options: Mapping[str, object], owner: str = "Extractor") -> dict[str, object]:
    """The values of the configuration's keys that the options set. owner: the class, for messages. Raises ConfigError
    for an unknown option."""
    for name in options:
        if name not in KEYS:
            hint = did_you_mean(name, KEYS)
            raise ConfigError(f"{owner} has no option {shown(name)}.{hint} It has {', '.join(sorted(KEYS))}.")
    try:
        values = {KEYS[name]: plain(value) for name, value in options.items()}
    except TypeError as error:
        raise ConfigError(f"{owner} cannot take one of its options: {error}.") from error
    sites = values.get("capture.sites")
    sites = [sites] if isinstance(sites, str) else sites
    if isinstance(sites, list):  # also as TransformerLens names them
        values["capture.sites"] = [site_name(site) if isinstance(site, str) else site for site in sites]
    for key in ("capture.dtype", "model.dtype"):  # also as numpy, torch and JAX name them
        if key in values and not isinstance(values[key], str):
            values[key] = parsed_dtype(values[key])
    return values


def configuration(values: Mapping[str, object], job: Mapping[str, object] | None = None) -> RunConfig:
    """The configuration of an Extractor with these values. Raises ConfigError.

    job: further values for `Extractor.save`, whose documents are a parquet file with the columns id and text.
    """
    given = _IN_MEMORY | dict(values) | dict(job or {})
    return from_values(ParquetData, {key: plain(value) for key, value in given.items()})


def plain(value: object) -> object:
    """Converts ranges, tuples and arrays to lists, and numbers of numpy, JAX and torch to Python's, for the
    configuration."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, str | bool | int | float | None):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    return operator.index(value) if hasattr(value, "__index__") else value
