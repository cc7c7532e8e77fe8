"""Opening the checkpoint of a trained SAE or transcoder, in any of the formats that are published."""

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

# By the files that only the format has together.
_FORMATS: Mapping[tuple[str, ...], Callable[[Files], Contents]] = {
    (saelens.CONFIG, saelens.WEIGHTS): saelens.read_contents,
    (sparsify.CONFIG, sparsify.WEIGHTS): sparsify.read_contents,
    (gemma_scope.WEIGHTS,): gemma_scope.read_contents,
    (gemma_scope_2.CONFIG, gemma_scope_2.WEIGHTS): gemma_scope_2.read_contents,
    (llama_scope.CONFIG, llama_scope.WEIGHTS): llama_scope.read_contents,
}
_MARKERS = tuple(dict.fromkeys(name for names in _FORMATS for name in names))


class SAE:
    """A trained sparse autoencoder or transcoder. Its arrays, by the names of `spec.ARRAYS`, are read on request.

    Methods raise CheckpointError for damaged files, naming the file, and PipelineError where a retry might help.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    @property
    def spec(self) -> SAESpec:
        """What it computes."""
        return self._contents.spec

    @property
    def format(self) -> str:
        """The format's name: saelens, sparsify, gemma_scope, gemma_scope_2 or llama_scope."""
        return self._contents.format

    @property
    def hook_name(self) -> str | None:
        """Where it was trained, as its file says: `blocks.12.hook_resid_post`, or a module of HF; None if unsaid."""
        return self._contents.hook_name

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of its arrays."""
        return {name: self._contents.shape(name) for name in self._contents.sources}

    def read(self, name: str) -> np.ndarray:
        """An array, C-ordered, in the dtype of the file (float32, float16 or bfloat16), or float32 where it is computed
        from what the file has. Every value is finite."""
        return self._contents.read(name)

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays, as `read` returns them."""
        return {name: self.read(name) for name in self.shapes}

    @property
    def identity(self) -> str:
        """The digest of all arrays."""
        return self.digest(self.shapes)

    def digest(self, names: Collection[str]) -> str:
        """A SHA-256 over the specification and every byte of some arrays, which are read one at a time. It depends on
        neither the address nor the format.
        """
        spec = {field.name: getattr(self.spec, field.name) for field in fields(SAESpec)}
        defaults = {field.name: field.default for field in fields(SAESpec)}
        digest = hashlib.sha256(json.dumps({key: spec[key] for key in spec if spec[key] != defaults[key]}).encode())
        for name in sorted(names):
            values = self.read(name)
            digest.update(json.dumps([name, values.dtype.name, values.shape]).encode())
            digest.update(values.view(np.uint8))
        return digest.hexdigest()


def open_sae(address: str) -> SAE:
    """The SAE or transcoder in a folder: a local one, `gs://bucket/folder`, or `hf://owner/name[@revision]/folder`; or
    around the file that the address names, as `.../params.npz`. No array is read yet.

    Raises CheckpointError where there is none, for unknown formats, architectures and attributes, and for tensors that
    are missing, unexpected or of the wrong shape; PipelineError where a retry might help.
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
    remedy = CONVERT if is_pickle else "Check the path; SAEs of several layers have a folder for each."
    got = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return CheckpointError(f"{files.where} is no SAE: expected {known}; got {got or 'no files'}. {remedy}")
