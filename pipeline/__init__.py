"""Runs a language model over text and stores its hidden activations, token by token, in a Zarr store.

The commands are modules of this package: `python -m pipeline.<command>`, with Hydra overrides or `key=value` arguments.

| command | what it does |
|---|---|
| `run` | fills a store: reads documents, runs the model, writes and commits blocks; the same command resumes |
| `plan` | prints shapes, bytes and memory of a run, or compiles its step for a TPU slice; computes nothing |
| `verify` | checks every committed block of a store |
| `inspect` | prints what a store holds; writes an HTML page and charts |
| `finalize` | marks a store complete that several workers have filled |
| `merge` | copies the blocks of several stores of one configuration into one |
| `index` | indexes the ids of a store's documents, so that a large store finds one in a few requests |
| `export` | copies a store into the cached activations of SAELens, or its features into delphi's latents |
| `delete` | deletes the objects of a store, and nothing else |

They end with exit code 0 (done), 42 (interrupted: run again to resume), 2 (the configuration, input or store is wrong)
or 1 (anything else: run again).

`pipeline.Extractor` gives activations in memory, in a notebook or a script, and `pipeline.Stream` batches of them for a
training, without a store (`pipeline.library`). `pipeline.store` reads stores, and imports neither JAX nor Hydra. The
errors of all are those of `pipeline.core.errors`; the names of activations are explained in `pipeline.core.sites`. All
other packages serve these and the commands, and their functions may change from version to version;
`docs/architecture.md` describes them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.library import Extractor as Extractor
    from pipeline.library import Stream as Stream


def __getattr__(name: str) -> object:
    """Imports the Extractor and the Stream, and JAX with them, when one is first asked for."""
    if name not in ("Extractor", "Stream"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pipeline import library

    return getattr(library, name)
