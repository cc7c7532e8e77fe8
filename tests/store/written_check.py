"""What a job writes and `pipeline.verify` does not compute again, since digests find every later change."""

from collections.abc import Mapping
from itertools import groupby

import numpy as np

from pipeline.store import ActivationStore
from pipeline.store.format.arrays import layout_of
from pipeline.store.format.commits import CommitRecord, read_commit_records
from pipeline.store.format.layout import FEATURE_PARTS
from pipeline.store.format.metadata import require_root
from pipeline.store.format.statistics import Statistics, read_stream_statistics, token_statistics

_RELATIVE = 1e-3  # the devices sum in float32


def assert_well_written(path: str) -> None:
    """Asserts that a block's arrays agree with each other, with its record and its documents, that the statistics of
    streams and the store are those of the values, and that a stream's blocks have every token of its documents
    once."""
    store = ActivationStore.open(path)
    num_streams = store.metadata.num_streams
    records = list(read_commit_records(store.storage, [(block.stream, block.block) for block in store.blocks]))
    rows = store.documents().to_pylist()
    assert_documents_are_whole(rows, {(r.stream, r.block) for r in records if r.exhausted})
    by_block = {(row["stream"], row["block"]): [] for row in rows}
    for row in rows:
        by_block[row["stream"], row["block"]].append(row)
    for record in records:
        assert_block_agrees(store, record, by_block.get((record.stream, record.block), []))
    is_stored, block_of_row = store.read_selected(store.rows) >= 0, store.rows // store.metadata.rows_per_block
    for key in store.keys:
        values = store.read(key, store.rows)
        assert_agree(store.statistics(key), token_statistics(values[is_stored]))
        for record in records:
            numbers = np.arange(record.block + 1) * num_streams + record.stream
            found, is_part = read_stream_statistics(store.storage, record), np.isin(block_of_row, numbers)
            assert_agree(found[key.name], token_statistics(values[is_part][is_stored[is_part]]))


def assert_block_agrees(store: ActivationStore, record: CommitRecord, rows: list[dict]) -> None:
    """rows: of the block's document table."""
    layout = layout_of(require_root(store.storage))
    first = layout.first_row(record.stream, record.block)
    arrays = {spec.name: store.arrays[spec.name] for spec in layout.all_arrays}
    block = {name: array[first : first + record.rows].read().result() for name, array in arrays.items()}
    valid = block["documents"] >= 0
    assert valid.any(axis=1).all()
    assert record.tokens == valid.sum()
    assert_windows(block, store.metadata.batch.get("overlap", 0))
    numbers, counts = np.unique(block["documents"][valid], return_counts=True)
    assert [row["document"] for row in rows] == numbers.tolist()
    assert [row["last_token"] - row["first_token"] for row in rows] == counts.tolist()
    assert (record.documents, record.tokens_cut) == (len(rows), sum(row["n_cut"] for row in rows))
    end = record.next["ordinal"] + (record.next["token"] > 0)
    assert [(n - record.stream) // layout.num_streams for n in numbers] == list(range(record.start["ordinal"], end))
    if layout.selected is not None:
        selected = block["selected"]
        order = np.where(selected < 0, valid.shape[1], selected)
        assert (np.sort(order, axis=1) == order).all()
        valid = np.take_along_axis(valid, np.maximum(selected, 0), axis=1) & (selected >= 0)
        assert (selected >= 0).sum() == valid.sum()
    assert record.activations == valid.sum()
    for spec in (*layout.arrays, *layout.scales, *layout.outputs):
        fill = block[spec.name][~valid]
        assert (fill == spec.fill).all(), spec.name
    for sae in store.metadata.encoders:
        assert_features(*(block[f"{sae['features']}.{part}"] for part in FEATURE_PARTS), sae["width"])


def assert_windows(block: Mapping[str, np.ndarray], overlap: int) -> None:
    """Each row has the windows 1, 2, ... of documents, with positions from 0, then padding. A window may begin with
    context."""
    for tokens, segments, positions, documents in zip(
        *(block[name] for name in ("tokens", "segments", "positions", "documents")), strict=True
    ):
        size = np.count_nonzero(segments)
        assert (np.diff(segments[:size], prepend=0) == (positions[:size] == 0)).all()
        assert not any(map(np.any, (segments[size:], positions[size:], tokens[size:], documents[size:] + 1)))
        for window in np.unique(segments[:size]):
            [slots] = np.nonzero(segments == window)
            assert (positions[slots] == np.arange(len(slots))).all()
            context = np.count_nonzero(documents[slots] < 0)
            assert context in (0, overlap)
            assert len(np.unique(documents[slots][context:])) == 1


def assert_features(index: np.ndarray, value: np.ndarray, n_active: np.ndarray, width: int) -> None:
    """Features of an SAE are distinct, in the order of their values, and as many as `n_active` says."""
    fires, value = index >= 0, value.astype(np.float32)
    assert (index < width).all()
    assert ((value > 0) == fires).all()
    assert (np.diff(value, axis=-1) <= 0).all()
    ordered = np.sort(np.where(fires, index, -1 - np.arange(index.shape[-1])), axis=-1)
    assert (np.diff(ordered, axis=-1) > 0).all()
    assert (np.minimum(n_active, index.shape[-1]) == fires.sum(axis=-1)).all()


def assert_agree(found: Statistics, expected: Statistics) -> None:
    assert (found.count, found.not_finite) == (expected.count, expected.not_finite)
    size = np.abs(expected.mean) + np.sqrt(expected.variance)
    assert (np.abs(found.mean - expected.mean) <= _RELATIVE * size).all()
    assert (np.abs(found.variance - expected.variance) <= np.square(_RELATIVE * size) + 0.01 * expected.variance).all()
    np.testing.assert_allclose(found.norm_sum, expected.norm_sum, rtol=_RELATIVE)
    # Norms at the edge of a bin may be in the next one.
    below, at_most = np.cumsum(found.norm_histogram), np.cumsum(expected.norm_histogram)
    assert (below[1:] >= at_most[:-1]).all()
    assert (below[:-1] <= at_most[1:]).all()


def assert_documents_are_whole(rows: list[dict], last: set[tuple[int, int]]) -> None:
    """rows: of the document tables. last: stream and block of the ends of streams; others are to be continued."""
    continued = {row["stream"]: row["document"] for row in rows}
    continued = {document for stream, document in continued.items() if stream not in dict(last)}
    rows = sorted(rows, key=lambda row: (row["document"], row["block"]))
    assert rows
    for document, parts in groupby(rows, key=lambda row: row["document"]):
        stop = 0
        for part in parts:
            assert part["first_token"] == stop
            stop = part["last_token"]
        assert stop == part["n_tokens"] - part["n_cut"] or (document in continued and stop < part["n_tokens"])
