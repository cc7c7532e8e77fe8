"""What is in a store? `python -m pipeline.inspect store.path=... [inspect.html=page.html]` looks at it.

Prints what the store holds and, from a sample of its rows, the norms of its activations; `inspect.html` writes that and
pictures as one HTML page that loads nothing else, `inspect.png` the charts alone, where matplotlib is installed (the
extra `png`). Works on unfinished and on remote stores.

    inspect.tokens     token slots to sample (16384)
    inspect.seed       of the sample (0)
    inspect.tokenizer  where tokenizer.json is; otherwise where the run had it; token ids are shown if it is not there

Exit codes: 0 done; 1 the store cannot be reached; 2 there is no store, or a setting is wrong; 42 interrupted.
"""

from pipeline.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from pipeline.access import named_writing_errors
from pipeline.addresses import unusable_path, without_credentials
from pipeline.data.tokenizer import TextTokenizer, load_tokenizer
from pipeline.errors import EXIT_OK, ConfigError, PipelineError
from pipeline.inspection.page import STATISTICS, render, statistics
from pipeline.inspection.pictures import document_charts, histograms, norm_charts, run_charts
from pipeline.inspection.sample import StoreSample, take_sample
from pipeline.inspection.summary import Summary, summarise
from pipeline.store import ActivationStore

USAGE = "python -m pipeline.inspect store.path=... [inspect.html=...] [inspect.png=...] [inspect.tokens=16384]"


@dataclass(frozen=True)
class Settings:
    """The command line."""

    path: str
    html: str | None = None
    png: str | None = None
    tokens: int = 16384
    seed: int = 0
    tokenizer: str | None = None


def main(arguments: list[str]) -> int:
    """Inspects the store that `arguments` name and returns the exit code."""
    try:
        inspect(parse(arguments))
    except PipelineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return EXIT_OK


def inspect(settings: Settings) -> None:
    store = ActivationStore.open(settings.path)
    summary = summarise(store)
    sample = take_sample(store, settings.tokens, settings.seed) if summary.blocks else None
    print("\n".join(summary.lines()))
    if sample is not None:
        print("\n".join(_columns([STATISTICS, *map(statistics, sample.views)])))
    if settings.html is not None:
        page = render(summary, sample, find_tokenizer(summary, settings.tokenizer))
        with _written("html", settings.html) as path:
            path.write_text(page, encoding="utf-8")
    if settings.png is not None:
        with _written("png", settings.png) as path:
            _write_png(path, summary, sample)


@contextmanager
def _written(setting: str, file: str) -> Iterator[Path]:
    with named_writing_errors(f"inspect.{setting}={file}"):
        yield Path(file).expanduser()
    print(f"{file}: {Path(file).expanduser().stat().st_size / 1024:.0f} KiB")


def _write_png(path: Path, summary: Summary, sample: StoreSample | None) -> None:
    try:
        from pipeline.inspection.png import write_png
    except ImportError as error:
        raise ConfigError(f"inspect.png needs matplotlib ({error}): pip install 'activation-pipeline[png]'.") from error
    charts = [] if sample is None else norm_charts(sample) + histograms(sample)
    charts += document_charts(summary)
    charts += [chart for snapshots in summary.runs.values() for chart in run_charts(snapshots)]
    write_png(path, summary.path, charts)


def find_tokenizer(summary: Summary, path: str | None) -> TextTokenizer | None:
    """The store's tokenizer, from `path` or from where the run had it; None where that is not to be found.

    Raises ConfigError when `path` is given and holds another one.
    """
    expected = summary.root.metadata.tokenizer.get("sha256")
    model = summary.root.metadata.config.get("model", {})
    place = path or model.get("tokenizer") or model.get("path")
    if place is None:
        return None
    try:
        tokenizer = load_tokenizer(place, revision=None if path else model.get("revision"))
    except PipelineError as error:
        if path:
            raise
        print(f"tokens are shown as ids: {error}", file=sys.stderr)
        return None
    if tokenizer.identity()["sha256"] == expected:
        return tokenizer
    if path:
        raise ConfigError(f"inspect.tokenizer={path} is not the store's: its sha256 is not {expected}.")
    print(
        f"tokens are shown as ids: the tokenizer at {without_credentials(place)} has changed since the run.",
        file=sys.stderr,
    )
    return None


def parse(arguments: list[str]) -> Settings:
    """Raises ConfigError."""
    keys = {"store.path": "path"} | {f"inspect.{f.name}": f.name for f in fields(Settings) if f.name != "path"}
    given: dict[str, str | int] = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in keys or not value:
            raise ConfigError(f"{argument!r} is no setting. Usage: {USAGE}")
        given[keys[key]] = value.strip("'\"")
    if "path" not in given:
        raise ConfigError(f"usage: {USAGE}")
    for name in {"html", "png"} & set(given):
        if reason := unusable_path(str(given[name]), f"inspect.{name}"):
            raise ConfigError(reason)
    for name, least in (("tokens", 1), ("seed", 0)):
        if name in given:
            text = str(given[name])
            if not text.isdecimal() or int(text) < least:
                raise ConfigError(f"inspect.{name}={text}: expected a whole number, at least {least}.")
            given[name] = int(text)
    return Settings(**given)


def _columns(table: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.ljust(w) if k < 2 else cell.rjust(w) for k, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
