"""Opens the checkpoint of a trained SAE or transcoder, in any of the formats in `formats/`."""

import re
from collections.abc import Callable, Mapping
from functools import cache

from pipeline.core.errors import CheckpointError
from pipeline.models.checkpoints.checkpoint_files import Files, open_file, open_folder
from pipeline.models.sae.autoencoder import SAE, shown_names
from pipeline.models.sae.formats import (
    circuit_tracer,
    dictionary_learning,
    gemma_scope,
    goodfire,
    hook_z,
    llama_scope,
    qwen_scope,
    saelens,
    sparsify,
)

# By files that identify the format.
_FORMATS: Mapping[tuple[str, ...], Callable[[Files], SAE]] = {
    (saelens.CONFIG, saelens.WEIGHTS): saelens.read_sae,
    (sparsify.CONFIG, sparsify.WEIGHTS): sparsify.read_sae,
    (gemma_scope.WEIGHTS,): gemma_scope.read_sae,
    (gemma_scope.WEIGHTS_2,): gemma_scope.read_sae_2,
    (llama_scope.CONFIG, llama_scope.WEIGHTS): llama_scope.read_sae,
    (llama_scope.CONFIG_R1, llama_scope.WEIGHTS_R1): llama_scope.read_sae_r1,
    (dictionary_learning.CONFIG, dictionary_learning.WEIGHTS): dictionary_learning.read_sae,
}
# By the name of a file in a folder with several SAEs.
_FILES: Mapping[str, Callable[[Files, str], SAE]] = {
    circuit_tracer.TRANSCODER: circuit_tracer.read_transcoder,
    circuit_tracer.CROSS_LAYER: circuit_tracer.read_cross_layer,
    gemma_scope.CROSS_LAYER: gemma_scope.read_cross_layer,
    qwen_scope.WEIGHTS: qwen_scope.read_sae,
    goodfire.WEIGHTS: goodfire.read_sae,
    hook_z.WEIGHTS: hook_z.read_sae,
}
_MARKERS = tuple(dict.fromkeys(name for names in _FORMATS for name in names))
_REMEDY = (
    "Check the path: SAEs for several layers have one folder per layer. The name of a file of torch tells its format: "
    "ae.pt beside config.json of dictionary_learning, or as it was published, layer5.sae.pt (Qwen-Scope), "
    "MODEL-SAE-l5.pth (Goodfire) or MODEL_L5_Hcat_z_....pt. Save another SAE in SAELens's format."
)


def open_sae(address: str) -> SAE:
    """Opens the SAE or transcoder in a folder, without reading its arrays.

    `address` is a local folder, `gs://bucket/folder`, `hf://owner/name[@revision]/folder`, or a file in such a folder
    (`.../params.npz`, or where a folder has several SAEs `.../layer_5.safetensors`).

    Raises CheckpointError if there is no SAE, if its format, architecture or an attribute is not implemented, and if
    tensors are missing, unexpected or have the wrong shape; PipelineError if a retry might help.
    """
    name = address.rpartition("/")[2]
    for pattern, read_file in _FILES.items():
        if re.fullmatch(pattern, name):
            return read_file(*open_file(address))
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
    file = next((name for name in names if any(re.fullmatch(pattern, name) for pattern in _FILES)), None)
    remedy = f"Name the file of one SAE: {files.where}/{file}." if file else _REMEDY
    return CheckpointError(
        f"{files.where} is not an SAE: expected {known}; got {shown_names(names) or 'no files'}. {remedy}"
    )
