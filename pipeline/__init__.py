"""Runs a language model over text and stores its hidden activations, token by token, in a Zarr store.

The commands are modules of this package: `python -m pipeline.<command>`, with Hydra overrides or `key=value` arguments.

| command | what it does |
|---|---|
| `run` | fills a store: reads documents, runs the model, writes and commits blocks; the same command resumes |
| `plan` | prints shapes, bytes and memory of a run, or compiles its step for a TPU slice; computes nothing |
| `verify` | checks every committed block of a store |
| `inspect` | prints a summary of a store; writes an HTML page and charts |
| `finalize` | marks a store as complete, also one that lacks tokens (`force=true`); indexes ids of documents |
| `export` | copies a store's activations to SAELens' cache, or its features to delphi's latents |
| `push` | uploads a finished store to the Hugging Face Hub |
| `delete` | deletes the objects of a store, and nothing else |

Their exit codes are 0 (done), 42 (interrupted: run again to resume), 2 (the configuration, input or store is wrong) and
1 (anything else: run again).

`pipeline.Extractor` returns activations in memory, for notebooks and scripts. `pipeline.Stream` yields batches of
activations to a training loop, without a store (`pipeline.library`). `pipeline.store` reads stores, and imports neither
JAX nor Hydra. All of them raise the errors of `pipeline.core.errors`; `pipeline.core.sites` explains the names of
activations. All other packages are internal and may change from version to version; `docs/architecture.md` describes
them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.library import Extractor as Extractor
    from pipeline.library import Stream as Stream


def __getattr__(name: str) -> object:
    """Imports Extractor and Stream, and with them JAX, on first access."""
    if name not in ("Extractor", "Stream"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pipeline import library

    return getattr(library, name)
