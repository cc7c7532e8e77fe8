"""Shows what is in a store: `python -m pipeline.inspect store.path=... [inspect.html=page.html]`.

Prints a summary of the store and, from a sample of its rows, the norms of its activations. `inspect.html` also writes
them, with charts and text, to one self-contained HTML page. If the store has features of an SAE (`capture.encode`), the
page shows how often they fire, and for some of them, their values and the contexts of their strongest firings. The
store may be unfinished or remote.

Exit codes: 0 done; 1 the store cannot be reached; 2 there is no store, or a setting is wrong; 42 interrupted.
"""

from pipeline.cluster.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.cli.settings import command, local_path, read_store_path, setting, whole_number, whole_numbers
from pipeline.core.errors import ConfigError
from pipeline.core.requests import named_writing_errors
from pipeline.store import ActivationStore
from pipeline.store.inspection.summary import find_tokenizer, store_facts
from pipeline.store.inspection.views import FEATURES_HEADER, NORMS_HEADER, features_rows, take_sample, view_features


@dataclass(frozen=True)
class Settings:
    path: str = read_store_path()
    html: str | None = setting("inspect.html", "a local file for the page", local_path, default=None)
    tokens: int = setting("inspect.tokens", "token slots to sample", whole_number(1), default=16384)
    seed: int = setting("inspect.seed", "seed of the sample", whole_number(0), default=0)
    tokenizer: str | None = setting(
        "inspect.tokenizer",
        "directory or Hub id with tokenizer.json; default: the run's (if it is gone, the page shows token ids)",
        default=None,
    )
    sae: str | None = setting(
        "inspect.sae",
        "the SAE whose features the page shows, e.g. blocks.5.resid_post; default: the first",
        default=None,
    )
    features: tuple[int, ...] = setting(
        "inspect.features",
        "the features that it shows, e.g. [12,99]; default: those that fire most and least often",
        whole_numbers,
        default=(),
    )
    contexts: int = setting("inspect.contexts", "maximum number of contexts per feature", whole_number(1), default=8)


def inspect_store(settings: Settings) -> None:
    """Prints the summary and writes the page."""
    if settings.html is None and (settings.sae or settings.features):
        given = "inspect.sae" if settings.sae else "inspect.features"
        raise ConfigError(f"{given} is only for the page. Set inspect.html to the file to write.")
    store = ActivationStore.open(settings.path)
    facts = store_facts(store)
    sample = take_sample(store, settings.tokens, settings.seed)
    print(store.path, *(f"  {name:12}{fact}" for name, fact in facts.items()), sep="\n")
    if sample is not None and sample.views:
        _print_table([NORMS_HEADER, *(view.table_row() for view in sample.views)])
    if sae_rows := features_rows(store):
        _print_table([FEATURES_HEADER, *sae_rows])
    if settings.html is None:
        return
    from pipeline.store.inspection.page import store_page  # imports matplotlib

    tokenizer = find_tokenizer(store.metadata, settings.tokenizer)
    sae = view_features(store, settings.sae, settings.features, settings.contexts)
    page, path = store_page(store, facts, sample, sae, tokenizer), Path(settings.html).expanduser()
    with named_writing_errors(f"inspect.html={settings.html}"):
        path.write_text(page, encoding="utf-8")
    print(f"{settings.html}: {path.stat().st_size / 1024:.0f} KiB")


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows of cells in columns, the first two aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        print("", *(cell.ljust(w) if k < 2 else cell.rjust(w) for k, (cell, w) in enumerate(cells)), sep="  ")


main = command("inspect", __doc__, Settings, inspect_store)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
