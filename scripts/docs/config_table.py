"""Writes docs/configuration.md, the table of configuration keys: `make config-table`."""

from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any

import hydra
from omegaconf import OmegaConf

from pipeline.config import composing
from pipeline.config.schema import REQUIRED, ArcData, DataConfig, GenerateData, HfData, ParquetData, RunConfig
from pipeline.config.typed import condition

FILE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
HEAD = """# Configuration

Every key of the configuration, for the command line (`python -m pipeline.run key=value ...`) and YAML files. `configs/`
has models, data sources and experiments to start from. `make config-table` writes this file from
`pipeline/config/schema.py`.

"""
SOURCES = {  # by choices of `data`; the table has the defaults of the first choice
    ("fineweb", "fineweb_edu", "demo"): ParquetData,
    ("arc",): ArcData,
    ("hf", "ai2_arc"): HfData,
    ("generate",): GenerateData,
}


def document() -> str:
    """The file's text: each key, its meaning, and its default in `python -m pipeline.run`."""
    composing.prepare()
    with hydra.initialize_config_dir(str(composing.CONFIGS), version_base="1.3"):
        lines = ["| key | meaning | default |", "|---|---|---|", *_rows(RunConfig, "", _composed())]
    return HEAD + "".join(f"{line}\n" for line in lines)


def _composed(*overrides: str) -> dict[str, Any]:
    return OmegaConf.to_container(hydra.compose("config", list(overrides)), resolve=False)


def _rows(cls: type, prefix: str, composed: Mapping[str, Any]) -> Iterator[str]:
    for f in fields(cls):
        if is_dataclass(f.type):
            yield f"| **{f.name}** | **{_summary(f.type)}** | |"
            yield from _rows(f.type, f"{f.name}.", composed[f.name])
        elif prefix + f.name == "data":
            yield f"| **data** | **{_summary(DataConfig)}** | |"
            yield _row("", f, "demo")
            yield from _data_rows()
        else:
            yield _row(prefix, f, composed[f.name])


def _data_rows() -> Iterator[str]:
    """The keys that all sources have, then the other keys of each source."""
    common = fields(DataConfig)
    for f in common[1:]:  # without `source`, which the choice of `data` sets
        yield _row("data.", f, f.default)
    for choices, cls in SOURCES.items():
        yield f"| **data={', '.join(choices)}** | **{_summary(cls)}** | |"
        defaults = _composed(f"data={choices[0]}")["data"]
        for f in fields(cls)[len(common) :]:
            default = REQUIRED if f.name == "prompts" else defaults[f.name]  # a source of its own
            yield _row("data.", f, default)


def _row(prefix: str, key: Field, default: Any) -> str:
    doc, needs = key.metadata["doc"], key.metadata.get("needs")
    doc = f"with {condition(needs, prefix)}: {doc}" if needs else doc
    shown = "" if default == REQUIRED else f"`{OmegaConf.to_yaml([default], resolve=False)[2:].strip()}`"
    if isinstance(default, list):
        shown = f"`[{', '.join(map(str, default))}]`"
    elif isinstance(default, float):
        shown = f"`{default:g}`"
    cells = (f"`{prefix}{key.name}`", doc, shown)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _summary(cls: type) -> str:
    return " ".join((cls.__doc__ or "").split()).rstrip(".")


if __name__ == "__main__":
    FILE.write_text(document())
