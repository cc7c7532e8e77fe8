"""Copies a store into SAELens' cached activations: `python -m pipeline.export store.path=... export.path=...`.

That is the Arrow data set that its CacheActivationsRunner writes, and that its training runners read with
`use_cached_activations`: a row per context, with a column [context, d] named after each TransformerLens hook and one of
token ids. A training loop of one's own needs no copy: see docs/reading.md.

Contexts are cut from the stored tokens in their order, without padding, so every position is a token; a context need
not begin with a document. The tokens that remain at the end, fewer than a context, are left out.

    export.arrays    comma-separated names (all)
    export.context   tokens of a context (the store's row length)
    export.dtype     float32, or float16; Arrow has no bfloat16 (float32: nothing is lost)

Exit codes: 0 done; 1 the store cannot be reached, or damaged; 2 there is no store, or a setting is wrong; 42
interrupted.
"""

from pipeline.cluster.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys
from dataclasses import dataclass, fields
from pathlib import Path

from pipeline.core.addresses import unusable_path
from pipeline.core.errors import EXIT_OK, ConfigError, PipelineError
from pipeline.store import ActivationStore
from pipeline.store.read.saelens_export import write_cached_activations

USAGE = "python -m pipeline.export store.path=... export.path=... [export.arrays=...] [export.context=...]"


@dataclass(frozen=True)
class Settings:
    """The command line."""

    store: str
    path: str
    arrays: tuple[str, ...] = ()
    context: int | None = None
    dtype: str = "float32"


def main(arguments: list[str]) -> int:
    """Exports the store that `arguments` name and returns the exit code."""
    try:
        settings = parse(arguments)
        store = ActivationStore.open(settings.store)
        names = settings.arrays or tuple(key.name for key in store.keys)
        context, path = settings.context or store.length, Path(settings.path).expanduser()
        contexts, left = write_cached_activations(store, path, names, context, settings.dtype)
    except PipelineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{settings.path}: {contexts:,} contexts of {context} tokens; {left} tokens are left out")
    return EXIT_OK


def parse(arguments: list[str]) -> Settings:
    """Raises ConfigError."""
    keys = {"store.path": "store"} | {f"export.{f.name}": f.name for f in fields(Settings) if f.name != "store"}
    given: dict[str, str] = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in keys or not value:
            raise ConfigError(f"{argument!r} is no setting. Usage: {USAGE}")
        given[keys[key]] = value.strip("'\"")
    if not {"store", "path"} <= set(given):
        raise ConfigError(f"usage: {USAGE}")
    if reason := unusable_path(given["path"], "export.path"):
        raise ConfigError(reason)
    if "://" in given["path"]:
        raise ConfigError(f"export.path={given['path']}: the data set is written to local files. Give a folder.")
    context, dtype = given.get("context", ""), given.get("dtype", Settings.dtype)
    if context and (not context.isdecimal() or int(context) < 1):
        raise ConfigError(f"export.context={context}: expected a whole number, at least 1.")
    if dtype not in ("float32", "float16"):
        raise ConfigError(f"export.dtype={dtype}: expected float32 or float16.")
    arrays = tuple(filter(None, given.get("arrays", "").split(",")))
    return Settings(given["store"], given["path"], arrays, int(context) if context else None, dtype)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
