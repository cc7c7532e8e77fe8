"""Batches of valid tokens: pieces of blocks are read into one buffer while the other is emptied.

Shapes: S slots (row, position) of a buffer, n tokens of a batch, D features of an activation.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import tensorstore as ts
from jaxtyping import Int32, Int64
from numpy.typing import DTypeLike

from pipeline.store.commits import CommitRecord
from pipeline.store.layout import MIB, POSITIONS, SIDE_ARRAYS, StoreLayout
from pipeline.store.rows import READS_AHEAD, require_stored, start_read, wait_read

# How many blocks are mixed with each other. Their side arrays, about 20 bytes per token, are held in memory.
WINDOW_BLOCKS = 32

# Reading ahead needs no more, when nothing is shuffled.
SEQUENTIAL_BUFFER_MIB = 64.0


@dataclass(frozen=True)
class Batch:
    """n tokens, none of them padding.

    activations: [n, D] when one activation was asked for, by array name when a list was. documents: the document's
    number; positions: from 0 in each document window; segments: the window's number in its row.
    """

    activations: np.ndarray | Mapping[str, np.ndarray]
    tokens: Int32[np.ndarray, " n"]
    segments: Int32[np.ndarray, " n"]
    positions: Int32[np.ndarray, " n"]
    documents: Int64[np.ndarray, " n"]


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one block, and what stands beside their activations: [rows, T] each."""

    first_row: int
    num_rows: int
    beside: Mapping[str, np.ndarray]


class BatchReader:
    """Reads the activation arrays `names` of the given blocks, in their order."""

    def __init__(
        self,
        layout: StoreLayout,
        arrays: Mapping[str, ts.TensorStore],
        blocks: Sequence[CommitRecord],
        names: tuple[str, ...],
        buffer_mib: float,
    ) -> None:
        self._layout = layout
        self._arrays = arrays
        self._blocks = [record for record in blocks if record.rows]
        self._names = names
        self._specs = {spec.name: spec for spec in layout.arrays}
        self._buffer_mib = buffer_mib

    def batches(
        self, batch_size: int, seed: int | None, dtype: DTypeLike, drop_last: bool, single: bool
    ) -> Iterator[Batch]:
        """Every valid token once; in the order of the rows, or, given a seed, shuffled."""
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, must be at least 1")
        parts: list[dict[str, np.ndarray]] = []
        have = 0
        for buffer in self._buffers(seed):
            start = 0
            while start < len(buffer.order):
                part = buffer.take(start, min(start + batch_size - have, len(buffer.order)))
                parts.append(part)
                start += len(part["tokens"])
                have += len(part["tokens"])
                if have == batch_size:
                    yield self._batch(parts, dtype, single)
                    parts, have = [], 0
        if parts and not drop_last:
            yield self._batch(parts, dtype, single)

    def _batch(self, parts: list[dict[str, np.ndarray]], dtype: DTypeLike, single: bool) -> Batch:
        joined = {name: _join([part[name] for part in parts]) for name in parts[0]}
        activations = {name: joined.pop(name) for name in self._names}
        if dtype is not None:
            activations = {name: values.astype(dtype, copy=False) for name, values in activations.items()}
        return Batch(activations[self._names[0]] if single else activations, **joined)

    def _buffers(self, seed: int | None) -> Iterator["_Buffer"]:
        """Filled buffers. Each is valid until the next is asked for, since there are two of them in turn."""
        rng = None if seed is None else np.random.default_rng(seed)
        pieces = self._pieces(rng)
        piece_rows = self._layout.piece_rows(self._names)
        capacity = self._buffer_rows(piece_rows, sequential=rng is None)
        spare, current = (_Buffer(self._layout, self._arrays, self._names, capacity) for _ in range(2))
        # One thread asks for the pieces of the next buffer; TensorStore's own threads read and check them.
        with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as pool:
            filling: Future[bool] = pool.submit(spare.fill, pieces, piece_rows, rng)
            while filling.result():
                spare, current = current, spare
                filling = pool.submit(spare.fill, pieces, piece_rows, rng)
                yield current

    def _pieces(self, rng: np.random.Generator | None) -> Iterator[Piece]:
        blocks = self._blocks if rng is None else [self._blocks[i] for i in rng.permutation(len(self._blocks))]
        for start in range(0, len(blocks), WINDOW_BLOCKS):
            pieces = self._window(blocks[start : start + WINDOW_BLOCKS])
            yield from (pieces if rng is None else (pieces[i] for i in rng.permutation(len(pieces))))

    def _window(self, blocks: Sequence[CommitRecord]) -> list[Piece]:
        """The pieces of some blocks, in order, with their side arrays read."""
        step = self._layout.piece_rows(self._names)
        beside = [_read_side_arrays(self._layout, self._arrays, record) for record in blocks]
        pieces = []
        for record, (values, reads) in zip(blocks, beside, strict=True):
            first = self._layout.first_row(record.stream, record.block)
            for name, read in reads.items():
                wait_read(self._arrays[name], read)
                if name != POSITIONS.name:  # where zeros are nothing unusual
                    require_stored(self._arrays[name], np.arange(first, first + record.rows), values[name])
            for r in range(0, record.rows, step):
                rows = {name: side[r : r + step] for name, side in values.items()}
                pieces.append(Piece(first + r, min(step, record.rows - r), rows))
        return pieces

    def _buffer_rows(self, piece_rows: int, sequential: bool) -> int:
        mib = min(self._buffer_mib, SEQUENTIAL_BUFFER_MIB) if sequential else self._buffer_mib
        row_bytes = sum(self._specs[name].position_bytes for name in self._names) * self._layout.length
        stored_rows = sum(record.rows for record in self._blocks)
        return max(piece_rows, min(int(mib * MIB) // row_bytes, stored_rows))


class _Buffer:
    """Memory for whole pieces of some activations and their side arrays: [rows, T] or [rows, T, D] each.

    `order` are the valid slots in the order in which they are to be handed out.
    """

    def __init__(
        self, layout: StoreLayout, arrays: Mapping[str, ts.TensorStore], names: tuple[str, ...], rows: int
    ) -> None:
        side_names = [spec.name for spec in SIDE_ARRAYS]
        self._stored = {name: arrays[name] for name in names}
        self._memory = {
            name: np.empty((rows, *arrays[name].shape[1:]), arrays[name].dtype.numpy_dtype)
            for name in (*names, *side_names)
        }
        self._rows = rows
        self.order: Int64[np.ndarray, " n"] = np.empty(0, np.int64)

    def fill(self, pieces: Iterator[Piece], piece_rows: int, rng: np.random.Generator | None) -> bool:
        """Reads pieces until no other is sure to fit. False when there was none."""
        reads: deque[tuple[ts.TensorStore, ts.WriteFutures]] = deque()
        row_numbers: list[np.ndarray] = []
        row = 0
        while row + piece_rows <= self._rows and (piece := next(pieces, None)) is not None:
            rows = slice(row, row + piece.num_rows)
            for name, array in self._stored.items():
                reads.append((array, start_read(array, piece.first_row, self._memory[name][rows])))
            for name, values in piece.beside.items():
                self._memory[name][rows] = values
            row_numbers.append(np.arange(piece.first_row, piece.first_row + piece.num_rows))
            row += piece.num_rows
            while len(reads) > READS_AHEAD:
                wait_read(*reads.popleft())
        valid = np.flatnonzero(self._memory["segments"][:row])
        self.order = valid if rng is None else rng.permutation(valid)
        while reads:
            wait_read(*reads.popleft())
        for name, array in self._stored.items() if row else ():
            require_stored(array, np.concatenate(row_numbers), self._memory[name][:row])
        return row > 0

    def take(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """The tokens `order[start:stop]`: a copy, [n] or [n, D] by name."""
        slots = self.order[start:stop]
        flat = ((name, values.reshape(-1, *values.shape[2:])) for name, values in self._memory.items())
        return {name: np.take(values, slots, axis=0) for name, values in flat}


def _read_side_arrays(
    layout: StoreLayout, arrays: Mapping[str, ts.TensorStore], record: CommitRecord
) -> tuple[dict[str, np.ndarray], dict[str, ts.WriteFutures]]:
    """Starts reading a block's side arrays: where they will be, and what to wait for."""
    shape = (record.rows, layout.length)
    first = layout.first_row(record.stream, record.block)
    values = {spec.name: np.empty(shape, spec.dtype) for spec in SIDE_ARRAYS}
    return values, {name: start_read(arrays[name], first, out) for name, out in values.items()}


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
