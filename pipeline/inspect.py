"""Shows what is in a store: `python -m pipeline.inspect store.path=... [inspect.html=page.html]`.

Prints a summary of the store and, from a sample of its rows, the norms of its activations. `inspect.html` also writes
them, with charts and text, to one self-contained HTML page. The store may be unfinished or remote.

`inspect.features_html` writes a page about the features of an SAE (`capture.encode`): how often they fire, and for some
of them, their values and the contexts of their strongest firings.

Exit codes: 0 done; 1 the store cannot be reached; 2 there is no store, or a setting is wrong; 42 interrupted.
"""

from pipeline.cluster.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys
from dataclasses import dataclass

from pipeline.cli.settings import local_path, read_store_path, setting, whole_number, whole_numbers
from pipeline.cli.store_command import run_command
from pipeline.core.errors import EXIT_OK, ConfigError
from pipeline.inspection.features import FeatureChoice
from pipeline.inspection.report import inspect


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
    features_html: str | None = setting(
        "inspect.features_html", "a local file for the page of an SAE's features", local_path, default=None
    )
    sae: str | None = setting(
        "inspect.sae", "for that page: which SAE, if the store has several, e.g. blocks.5.resid_post", default=None
    )
    features: tuple[int, ...] = setting(
        "inspect.features",
        "for that page, e.g. [12,99]; default: those that fire most and least often",
        whole_numbers,
        default=(),
    )
    extremes: int = setting(
        "inspect.extremes", "number of most frequent, and of least frequent, features", whole_number(1), default=8
    )
    contexts: int = setting("inspect.contexts", "maximum number of contexts per feature", whole_number(1), default=8)


def inspect_store(settings: Settings) -> int:
    """Prints the report and writes the files. Returns the exit code."""
    if settings.features_html is None and (settings.sae or settings.features):
        given = "inspect.sae" if settings.sae else "inspect.features"
        raise ConfigError(f"{given} is only for the page of features. Set inspect.features_html to the file to write.")
    choice = FeatureChoice(settings.sae, settings.features, settings.extremes, settings.contexts)
    features = None if settings.features_html is None else (settings.features_html, choice)
    inspect(settings.path, settings.html, settings.tokens, settings.seed, settings.tokenizer, features)
    return EXIT_OK


def main(arguments: list[str]) -> int:
    return run_command("inspect", __doc__, Settings, inspect_store, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
