"""Copies a store into another library's format: `python -m pipeline.export store.path=... export.path=...`.

format=saelens: activations as the Arrow data set that SAELens' CacheActivationsRunner writes and that its training
runners read with `use_cached_activations`: a row per context, with a column [context, d] for each TransformerLens hook
and a column of token ids. Your own training loop needs no copy: see docs/reading.md.

format=delphi: features (`capture.encode`) as the latents that EleutherAI's delphi caches, for its LatentDataset: a
folder for each SAE, with files for ranges of features.

Contexts are cut from the stored tokens in order, without padding: every position is a token, and a context may begin in
the middle of a document. Tokens at the end that do not fill a context are left out.

Exit codes: 0 done; 1 the store cannot be reached or is damaged; 2 there is no store, or a setting is wrong; 42
interrupted.
"""

from pipeline.cluster.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys
from dataclasses import dataclass
from pathlib import Path

from pipeline.cli.settings import command, local_path, names, one_of, read_store_path, setting, whole_number
from pipeline.core.errors import ConfigError
from pipeline.store import ActivationStore
from pipeline.store.read.exports.delphi import write_latents
from pipeline.store.read.exports.saelens import write_cached_activations


@dataclass(frozen=True)
class Settings:
    store: str = read_store_path()
    path: str = setting("export.path", "a new local folder for the copy", local_path)
    format: str = setting(
        "export.format", "saelens: activations; delphi: features", one_of("saelens", "delphi"), default="saelens"
    )
    arrays: tuple[str, ...] = setting("export.arrays", "comma-separated names; default: all", names, default=())
    context: int | None = setting(
        "export.context", "tokens per context; default: the store's row length", whole_number(1), default=None
    )
    dtype: str = setting(
        "export.dtype",
        "float32 (exact) or float16; neither library reads bfloat16",
        one_of("float32", "float16"),
        default="float32",
    )
    splits: int | None = setting(
        "export.splits",
        "with export.format=delphi: files per SAE; default: 5, as delphi",
        whole_number(1),
        default=None,
    )


def export(settings: Settings) -> None:
    """Writes the copy."""
    store = ActivationStore.open(settings.store)
    is_delphi = settings.format == "delphi"
    if settings.splits is not None and not is_delphi:
        raise ConfigError("export.splits is only for export.format=delphi. Remove it.")
    features = (sae["features"].removeprefix("features.") for sae in store.metadata.encoders)
    arrays = settings.arrays or tuple(features if is_delphi else (key.name for key in store.keys))
    if not arrays:
        raise ConfigError(
            f"{settings.store} has no {'features' if is_delphi else 'activations'} to export. Set export.format to "
            f"{'saelens to export its activations' if is_delphi else 'delphi to export its features'}."
        )
    path, context = Path(settings.path).expanduser(), settings.context or store.length
    if is_delphi:
        contexts, left, firings, lost = write_latents(
            store, path, arrays, context, settings.splits or 5, settings.dtype
        )
        print(f"{firings:,} feature values; {lost:,} more were not stored (capture.encode_top)")
    else:
        contexts, left = write_cached_activations(store, path, arrays, context, settings.dtype)
    print(f"{settings.path}: {contexts:,} contexts of {context} tokens; {left} tokens left out")


main = command("export", __doc__, Settings, export)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
