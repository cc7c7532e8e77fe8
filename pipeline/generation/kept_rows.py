"""Activations kept during decoding, which extraction reads in place of a forward pass (capture.when=decode).

Shapes: R rows of a block, T positions, D features.
"""

from dataclasses import dataclass, field

import jax
import ml_dtypes  # noqa: F401  registers "bfloat16" with NumPy
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from pipeline.cluster.sharding import put_rows, row_sharding
from pipeline.core.sites import ActivationKey
from pipeline.data.documents import TokenBlock
from pipeline.job.opening import Job
from pipeline.store.generated.completions import document_tokens
from pipeline.store.generated.kept_activations import read_kept


@dataclass(frozen=True)
class _KeptGroup:
    """A group's activations. `starts` maps a document's number in the stream to its first token in the arrays."""

    starts: dict[int, int]
    arrays: dict[ActivationKey, Float[np.ndarray, "n D"]]


@dataclass
class KeptRows:
    """The activations of rows of a block, [B, T, D] by key, read from the groups of its documents."""

    job: Job
    mesh: Mesh
    _block: TokenBlock | None = None
    _groups: dict[tuple[int, int], _KeptGroup] = field(default_factory=dict)  # of the last block, by stream and index
    _values: dict[ActivationKey, Float[np.ndarray, "R T D"]] = field(default_factory=dict)

    def for_rows(self, block: TokenBlock | None, rows: slice) -> dict[ActivationKey, jax.Array]:
        """The activations of this process's `rows` of a block, on the devices. Rows that are missing are 0, as are all
        rows without a block."""
        plan = self.job.plan
        if block is not None and block is not self._block:
            self._block, self._values = block, self._read(block)
        local = {}
        dtype, shape = str(self.job.config.model.dtype), (plan.mesh.process_rows, plan.step.length)
        for key, array in plan.step.activations.items():
            local[key] = np.zeros((*shape, *array.token_shape), dtype)
            if block is not None:
                values = self._values[key][rows]
                local[key][: len(values)] = values
        return put_rows(row_sharding(self.mesh), local)

    def _read(self, block: TokenBlock) -> dict[ActivationKey, Float[np.ndarray, "R T D"]]:
        plan, size = self.job.plan, self.job.config.data.group
        slots, table_rows, tokens = document_tokens(block.documents, block.table)
        ordinals = ((block.table["document"].to_numpy() - block.stream) // plan.streams.count)[table_rows]
        needed = {(block.stream, int(index)) for index in np.unique(ordinals // size)}
        self._groups = {group: self._groups.get(group) or self._load(*group) for group in sorted(needed)}
        dtype, shape = str(self.job.config.model.dtype), block.documents.shape
        values = {key: np.zeros((*shape, *array.token_shape), dtype) for key, array in plan.step.activations.items()}
        for (_, index), group in self._groups.items():
            members = np.flatnonzero(ordinals // size == index)
            starts = np.array([group.starts[ordinal] for ordinal in ordinals[members].tolist()], np.int64)
            for key, array in values.items():
                array.reshape(-1, array.shape[2])[slots[members]] = group.arrays[key][starts + tokens[members]]
        return values

    def _load(self, stream: int, index: int) -> _KeptGroup:
        plan, dtype = self.job.plan, np.dtype(str(self.job.config.model.dtype))
        group = self.job.generated(stream).read(index)
        documents = group.documents
        ends = np.cumsum([0, *(len(document.tokens) for document in documents)]).tolist()
        starts = {document.cursor.ordinal: start for document, start in zip(documents, ends, strict=False)}
        arrays = {
            key: read_kept(self.job.storage, group.kept(stream), array.name, dtype, (ends[-1], array.width))
            for key, array in plan.step.activations.items()
        }
        return _KeptGroup(starts, arrays)
