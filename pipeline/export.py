"""Copies a store into SAELens' cached activations: `python -m pipeline.export store.path=... export.path=...`.

The copy is the Arrow data set that SAELens' CacheActivationsRunner writes and that its training runners read with
`use_cached_activations`: a row per context, with a column [context, d] for each TransformerLens hook and a column of
token ids. Your own training loop needs no copy: see docs/reading.md.

Contexts are cut from the stored tokens in order, without padding: every position is a token, and a context may begin in
the middle of a document. The last tokens, fewer than a context, are left out.

Exit codes: 0 done; 1 the store cannot be reached or is damaged; 2 there is no store, or a setting is wrong; 42
interrupted.
"""

from pipeline.cluster.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys
from dataclasses import dataclass
from pathlib import Path

from pipeline.cli.settings import local_path, names, one_of, setting, store_path, whole_number
from pipeline.cli.store_command import run_command
from pipeline.core.errors import EXIT_OK, ConfigError
from pipeline.store import ActivationStore
from pipeline.store.read.saelens_export import write_cached_activations


@dataclass(frozen=True)
class Settings:
    store: str = store_path()
    path: str = setting("export.path", "a new local folder for the data set", local_path)
    arrays: tuple[str, ...] = setting(
        "export.arrays", "names, separated by commas; if not given, all", names, default=()
    )
    context: int | None = setting(
        "export.context", "tokens of a context; if not given, the store's row length", whole_number(1), default=None
    )
    dtype: str = setting(
        "export.dtype",
        "float32 (exact) or float16; Arrow has no bfloat16",
        one_of("float32", "float16"),
        default="float32",
    )


def export(settings: Settings) -> int:
    """Writes the data set. Returns the exit code."""
    store = ActivationStore.open(settings.store)
    arrays = settings.arrays or tuple(key.name for key in store.keys)
    if not arrays:
        raise ConfigError(f"{settings.store} has features, but no activations, which are what is exported.")
    context, path = settings.context or store.length, Path(settings.path).expanduser()
    contexts, left = write_cached_activations(store, path, arrays, context, settings.dtype)
    print(f"{settings.path}: {contexts:,} contexts of {context} tokens; {left} tokens are left out")
    return EXIT_OK


def main(arguments: list[str]) -> int:
    return run_command("export", __doc__, Settings, export, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
