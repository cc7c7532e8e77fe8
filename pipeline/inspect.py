"""Shows what is in a store: `python -m pipeline.inspect store.path=... [inspect.html=page.html]`.

Prints what the store holds and, from a sample of its rows, the norms of its activations. `inspect.html` writes the same
with charts and text as one HTML page that loads nothing else, `inspect.png` the charts alone. Unfinished and remote
stores can be inspected, too.

Exit codes: 0 done; 1 the store cannot be reached; 2 there is no store, or a setting is wrong; 42 interrupted.
"""

from pipeline.cluster.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys
from dataclasses import dataclass

from pipeline.cli.settings import local_path, setting, store_path, whole_number
from pipeline.cli.store_command import run_command
from pipeline.core.errors import EXIT_OK
from pipeline.inspection.report import inspect


@dataclass(frozen=True)
class Settings:
    path: str = store_path()
    html: str | None = setting("inspect.html", "a local file for the page", local_path, default=None)
    png: str | None = setting("inspect.png", "a local file for the charts", local_path, default=None)
    tokens: int = setting("inspect.tokens", "token slots to sample", whole_number(1), default=16384)
    seed: int = setting("inspect.seed", "seed of the sample", whole_number(0), default=0)
    tokenizer: str | None = setting(
        "inspect.tokenizer",
        "where tokenizer.json is; if not given, where the run had it (the page shows token ids if it is gone)",
        default=None,
    )


def inspect_store(settings: Settings) -> int:
    """Prints the report and writes the files. Returns the exit code."""
    inspect(settings.path, settings.html, settings.png, settings.tokens, settings.seed, settings.tokenizer)
    return EXIT_OK


def main(arguments: list[str]) -> int:
    return run_command("inspect", __doc__, Settings, inspect_store, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
