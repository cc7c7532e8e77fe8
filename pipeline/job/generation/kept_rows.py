"""Activations kept during decoding, which extraction reads in place of a forward pass (capture.when=decode).

Shapes: R rows of a block, T positions, D features.
"""

from dataclasses import dataclass, field

import jax
import ml_dtypes  # noqa: F401  registers "bfloat16" with NumPy
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from pipeline.cluster.sharding import put_rows
from pipeline.core.sites import ActivationKey
from pipeline.data.documents import TokenBlock
from pipeline.job.job import Job
from pipeline.store.generated.documents import document_tokens

DocumentActivations = dict[int, dict[str, Float[np.ndarray, "n D"]]]  # by the document's number in its stream


@dataclass
class KeptRows:
    """The activations of rows of a block, [B, T, D] by key, read from the groups of its documents."""

    job: Job
    mesh: Mesh
    _block: TokenBlock | None = None
    _groups: dict[tuple[int, int], DocumentActivations] = field(default_factory=dict)  # by stream and index
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
        return put_rows(self.mesh, local)

    def _read(self, block: TokenBlock) -> dict[ActivationKey, Float[np.ndarray, "R T D"]]:
        plan, size = self.job.plan, self.job.config.data.group_size
        slots, table_rows, tokens = document_tokens(block.documents, block.table)
        ordinals = (block.table["document"].to_numpy() - block.stream) // plan.streams.count
        needed = {(block.stream, index) for index in np.unique(ordinals // size).tolist()}
        self._groups = {group: self._groups.get(group) or self._load(*group) for group in sorted(needed)}
        dtype, shape = str(self.job.config.model.dtype), block.documents.shape
        values = {key: np.zeros((*shape, *array.token_shape), dtype) for key, array in plan.step.activations.items()}
        firsts = np.flatnonzero(np.diff(table_rows, prepend=-1))  # of each document's tokens
        parts = zip(table_rows[firsts], np.split(slots, firsts)[1:], np.split(tokens, firsts)[1:], strict=True)
        for table_row, slots_of_document, tokens_of_document in parts:
            ordinal = int(ordinals[table_row])
            activations = self._groups[block.stream, ordinal // size][ordinal]
            for key, array in values.items():
                array.reshape(-1, array.shape[2])[slots_of_document] = activations[key.name][tokens_of_document]
        return values

    def _load(self, stream: int, index: int) -> DocumentActivations:
        widths = {array.name: array.width for array in self.job.plan.step.activations.values()}
        return self.job.generated(stream).read_activations(index, widths, str(self.job.config.model.dtype))
