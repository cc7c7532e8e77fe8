"""Opens the checkpoint of a trained SAE or transcoder, in any of the formats in `formats/`."""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import cache, cached_property

import numpy as np

from pipeline.core.errors import CheckpointError
from pipeline.models.checkpoints.checkpoint_files import Files
from pipeline.models.sae.contents import Contents
from pipeline.models.sae.folder import CONVERT, open_folder
from pipeline.models.sae.formats import gemma_scope, gemma_scope_2, llama_scope, saelens, sparsify
from pipeline.models.sae.spec import SAESpec

# By files that identify the format.
_FORMATS: Mapping[tuple[str, ...], Callable[[Files], Contents]] = {
    (saelens.CONFIG, saelens.WEIGHTS): saelens.read_contents,
    (sparsify.CONFIG, sparsify.WEIGHTS): sparsify.read_contents,
    (gemma_scope.WEIGHTS,): gemma_scope.read_contents,
    (gemma_scope_2.CONFIG, gemma_scope_2.WEIGHTS): gemma_scope_2.read_contents,
    (llama_scope.CONFIG, llama_scope.WEIGHTS): llama_scope.read_contents,
}
_MARKERS = tuple(dict.fromkeys(name for names in _FORMATS for name in names))


class SAE:
    """A trained sparse autoencoder or transcoder. Its arrays have the names of `spec.ARRAYS`, and are read on request.

    Methods raise CheckpointError for damaged files, and PipelineError if a retry might help.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    @property
    def spec(self) -> SAESpec:
        """What the SAE computes, without its arrays."""
        return self._contents.spec

    @property
    def format(self) -> str:
        """The format's name: saelens, sparsify, gemma_scope, gemma_scope_2 or llama_scope."""
        return self._contents.format

    @property
    def hook_name(self) -> str | None:
        """The site it was trained on, if its file says so: `blocks.12.hook_resid_post`, or the name of an HF module."""
        return self._contents.hook_name

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Array name -> shape."""
        return {name: self._contents.shape(name) for name in self._contents.sources}

    def read(self, name: str) -> np.ndarray:
        """Reads an array, C-ordered, in the file's dtype (float32, float16 or bfloat16), or in float32 if it is
        computed from the file's tensors. All values are finite."""
        return self._contents.read(name)

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays, as `read` returns them."""
        return {name: self.read(name) for name in self.shapes}

    @property
    def identity(self) -> str:
        """The digest of the specification and all arrays."""
        return self.digest(self.shapes)

    def digest(self, names: Collection[str]) -> str:
        """A SHA-256 over the specification and all bytes of the named arrays, which are read one at a time. It does not
        depend on the address or the format."""
        spec = {field.name: getattr(self.spec, field.name) for field in fields(SAESpec)}
        defaults = {field.name: field.default for field in fields(SAESpec)}
        digest = hashlib.sha256(json.dumps({key: spec[key] for key in spec if spec[key] != defaults[key]}).encode())
        for name in sorted(names):
            values = self.read(name)
            digest.update(json.dumps([name, values.dtype.name, values.shape]).encode())
            digest.update(values.view(np.uint8))
        return digest.hexdigest()


def open_sae(address: str) -> SAE:
    """Opens the SAE or transcoder in a folder, without reading its arrays.

    `address` is a local folder, `gs://bucket/folder`, `hf://owner/name[@revision]/folder`, or a file in such a folder
    (`.../params.npz`).

    Raises CheckpointError if there is no SAE, if its format, architecture or an attribute is not implemented, and if
    tensors are missing, unexpected or have the wrong shape; PipelineError if a retry might help.
    """
    files = open_folder(address, _MARKERS)
    has = cache(files.has)
    for names, read_contents in _FORMATS.items():
        if all(has(name) for name in names):
            return SAE(read_contents(files))
    raise _unknown_format(files)


def _unknown_format(files: Files) -> CheckpointError:
    try:
        names = files.names()
    except FileNotFoundError:
        names = []
    known = "; ".join(" and ".join(needed) for needed in _FORMATS)
    is_pickle = any(name.endswith((".pt", ".pth", ".bin", ".pkl")) for name in names)
    remedy = CONVERT if is_pickle else "Check the path. SAEs for several layers have one folder per layer."
    got = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return CheckpointError(f"{files.where} is not an SAE: expected {known}; got {got or 'no files'}. {remedy}")
