"""What a job writes and `pipeline.verify` does not compute again, since digests find every later change."""

from itertools import groupby

import numpy as np

from pipeline.store import ActivationStore
from pipeline.store.format.commits import read_stream_records
from pipeline.store.format.statistics import Statistics, decode_statistics, statistics_key, token_statistics

_RELATIVE = 1e-3  # the devices sum in float32


def assert_well_written(path: str) -> None:
    """Asserts that the statistics of blocks, streams and the store are those of the values, and that a stream's blocks
    have every token of its documents once."""
    store = ActivationStore.open(path)
    num_streams = store.metadata.num_streams
    records = [record for stream in range(num_streams) for record in read_stream_records(store.storage, stream)]
    assert_documents_are_whole(store.documents.to_pylist(), {(r.stream, r.block) for r in records if r.exhausted})
    is_stored, block_of_row = store.read_selected(store.rows) >= 0, store.rows // store.metadata.rows_per_block
    for key in store.keys:
        values = store.read(key.layer, key.site, store.rows)
        assert_agree(store.statistics(key), token_statistics(values[is_stored]))
        for record in records:
            content = store.storage.read(statistics_key(record.stream, record.block))
            numbers = np.arange(record.block + 1) * num_streams + record.stream
            for found, blocks in zip(decode_statistics(content, record), (numbers[-1:], numbers), strict=True):
                rows = np.isin(block_of_row, blocks)
                assert_agree(found[key.name], token_statistics(values[rows][is_stored[rows]]))


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
