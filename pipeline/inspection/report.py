"""The report on a store: printed, and as HTML pages."""

import sys
from pathlib import Path

from pipeline.config.choices import SpecialTokens
from pipeline.core.addresses import without_credentials
from pipeline.core.errors import ConfigError, PipelineError
from pipeline.core.file_errors import named_writing_errors
from pipeline.data.text.tokenizer import TextTokenizer, load_tokenizer
from pipeline.inspection.features import SUMMARY_HEADER, FeatureChoice, summary_rows, view_features
from pipeline.inspection.sample import take_sample
from pipeline.inspection.summary import Summary, summarise
from pipeline.inspection.tables import HEADER, table_row
from pipeline.store import ActivationStore


def inspect(
    store_path: str,
    html: str | None,
    num_tokens: int,
    seed: int,
    tokenizer: str | None,
    features: tuple[str, FeatureChoice] | None = None,
) -> None:
    """Prints a store's summary, the norms in a sample of `num_tokens` token slots, and how often features fire. Writes
    the page to `html`, and the page about an SAE's `features` to a file, if given. For `tokenizer`, see
    `find_tokenizer`. Raises StoreError and ConfigError."""
    store = ActivationStore.open(store_path)
    summary = summarise(store)
    sample = take_sample(store, num_tokens, seed) if len(summary.blocks) else None
    print("\n".join(summary.lines()))
    if sample is not None and sample.views:
        print("\n".join(_columns([HEADER, *map(table_row, sample.views)])))
    if sae_rows := summary_rows(store):
        print("\n".join(_columns([SUMMARY_HEADER, *sae_rows])))
    loaded = find_tokenizer(summary, tokenizer) if html is not None or features is not None else None
    if html is not None:
        from pipeline.inspection import page  # imports matplotlib

        _write_page("html", html, page.render(summary, sample, loaded))
    if features is not None:
        from pipeline.inspection import feature_page  # imports matplotlib

        file, choice = features
        _write_page("features_html", file, feature_page.render(summary, view_features(store, choice), loaded))


def _write_page(setting: str, file: str, page: str) -> None:
    path = Path(file).expanduser()
    with named_writing_errors(f"inspect.{setting}={file}"):
        path.write_text(page, encoding="utf-8")
    print(f"{file}: {path.stat().st_size / 1024:.0f} KiB")


def find_tokenizer(summary: Summary, path: str | None) -> TextTokenizer | None:
    """The store's tokenizer, from `path` or from the run's location; None if it is no longer there or has changed.

    Raises ConfigError if `path` contains a different tokenizer.
    """
    expected = summary.root.metadata.tokenizer.get("sha256")
    model = summary.root.metadata.config.get("model", {})
    location = path or model.get("tokenizer") or model.get("path")
    if location is None:
        return None
    try:
        revision = None if path else model.get("revision")
        tokenizer = load_tokenizer(location, revision=revision, special_tokens=SpecialTokens.none)  # it only decodes
    except PipelineError as error:
        if path:
            raise
        print(f"tokens are shown as ids: {error}", file=sys.stderr)
        return None
    if tokenizer.identity()["sha256"] == expected:
        return tokenizer
    if path:
        raise ConfigError(
            f"inspect.tokenizer={path} is not the store's tokenizer: its sha256 is {tokenizer.identity()['sha256']}, "
            f"expected {expected}. Set it to the tokenizer of the run."
        )
    print(
        f"tokens are shown as ids: the tokenizer at {without_credentials(location)} has changed since the run.",
        file=sys.stderr,
    )
    return None


def _columns(table: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.ljust(w) if k < 2 else cell.rjust(w) for k, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]
