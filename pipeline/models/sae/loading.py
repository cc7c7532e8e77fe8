"""Opens the checkpoint of a trained SAE or transcoder, in any of the formats in `formats/`."""

from collections.abc import Callable, Mapping
from functools import cache

from pipeline.core.errors import CheckpointError
from pipeline.models.checkpoints.checkpoint_files import Files
from pipeline.models.sae.autoencoder import SAE, shown_names
from pipeline.models.sae.folder import CONVERT, PICKLES, open_folder
from pipeline.models.sae.formats import gemma_scope, llama_scope, saelens, sparsify

# By files that identify the format.
_FORMATS: Mapping[tuple[str, ...], Callable[[Files], SAE]] = {
    (saelens.CONFIG, saelens.WEIGHTS): saelens.read_sae,
    (sparsify.CONFIG, sparsify.WEIGHTS): sparsify.read_sae,
    (gemma_scope.WEIGHTS,): gemma_scope.read_sae,
    (gemma_scope.CONFIG_2, gemma_scope.WEIGHTS_2): gemma_scope.read_sae_2,
    (llama_scope.CONFIG, llama_scope.WEIGHTS): llama_scope.read_sae,
}
_MARKERS = tuple(dict.fromkeys(name for names in _FORMATS for name in names))


def open_sae(address: str) -> SAE:
    """Opens the SAE or transcoder in a folder, without reading its arrays.

    `address` is a local folder, `gs://bucket/folder`, `hf://owner/name[@revision]/folder`, or a file in such a folder
    (`.../params.npz`).

    Raises CheckpointError if there is no SAE, if its format, architecture or an attribute is not implemented, and if
    tensors are missing, unexpected or have the wrong shape; PipelineError if a retry might help.
    """
    files = open_folder(address, _MARKERS)
    has = cache(files.has)
    for names, read_sae in _FORMATS.items():
        if all(has(name) for name in names):
            return read_sae(files)
    raise _unknown_format(files)


def _unknown_format(files: Files) -> CheckpointError:
    try:
        names = files.names()
    except FileNotFoundError:
        names = []
    known = "; ".join(" and ".join(needed) for needed in _FORMATS)
    is_pickle = any(name.endswith(PICKLES) for name in names)
    remedy = CONVERT if is_pickle else "Check the path. SAEs for several layers have one folder per layer."
    return CheckpointError(
        f"{files.where} is not an SAE: expected {known}; got {shown_names(names) or 'no files'}. {remedy}"
    )
