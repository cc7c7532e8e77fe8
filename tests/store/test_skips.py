"""What a run skips is counted once, by reason, however often the run is interrupted and whichever process skips it."""

import gzip
import json
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.store import ActivationStore
from pipeline.store.check.verifying import verify_store
from pipeline.store.inspection.summary import store_facts
from tests.jobs import run_here

pytestmark = pytest.mark.usefixtures("cached_steps")


def parquet(path: Path) -> None:
    """Ninety rows in groups of 30; the second group has a damaged page, and row 5 of each group no text."""
    texts = [None if row % 30 == 5 else f"text {row} with some more words" for row in range(90)]
    table = pa.table({"text": texts, "id": [str(row) for row in range(90)]})
    pq.write_table(table, path, row_group_size=30, write_page_checksum=True, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[content.index(b"text 44")] ^= 1  # only the checksum reveals this
    path.write_bytes(content)


def json_lines(path: Path) -> None:
    lines = [json.dumps({"text": f"text {row} with some more words"}) for row in range(90)]
    lines[5] = lines[55] = '{"text": ""}'
    lines[40] = '{"text": "unfinished'
    path.write_text("\n".join(lines))


def truncated(path: Path) -> None:
    lines = "".join(json.dumps({"text": f"line {row} with some more words"}) + "\n" for row in range(90))
    path.write_bytes(gzip.compress(lines.encode(), mtime=0)[:-9])


SKIPS = {  # by source: its files and how they are written, and what is skipped
    "fineweb": (
        {"a.parquet": parquet},
        "32 rows of the input (data.on_error=skip): ",
        "30 rows, first a.parquet row 30: not readable as parquet: could not verify page integrity, CRC checksum "
        "verification failed for page_ordinal 0",
        "2 rows, first a.parquet row 5: 'text' is null",
    ),
    "hf": (
        {"b.jsonl": json_lines, "c.jsonl.gz": truncated},
        "1 damaged file, first c.jsonl.gz row ",
        "2 rows, first b.jsonl row 5: the text is empty",
        "1 row, first b.jsonl row 40: not JSON: Invalid control character at: line 1 column 21 (char 20)",
    ),
}


@pytest.mark.parametrize("source", SKIPS)
def test_skips_are_counted_once(source: str, tmp_path: Path, caplog) -> None:
    files, *expected = SKIPS[source]
    (tmp_path / "text").mkdir()
    for name, write in files.items():
        write(tmp_path / "text" / name)
    options = [f"data={source}", f"data.path={tmp_path / 'text'}", "data.on_error=skip", "capture.layers=[0]"]
    options += ["batch.rows=1", "batch.length=32", "store.rows_per_block=2"]
    skipped = []
    for store, runs in {"once": ["null"], "extended": ["200", "null"]}.items():
        path = str(tmp_path / store)
        for tokens in runs:
            caplog.clear()
            with caplog.at_level(logging.WARNING, "pipeline"):
                run_here(*options, f"store.path={path}", f"run.max_tokens={tokens}")
        [logged] = [record.getMessage() for record in caplog.records if " skipped " in record.getMessage()]
        skipped.append(logged.partition(" skipped ")[2])
        assert verify_store(path) == []
        assert store_facts(ActivationStore.open(path))["skipped"] == skipped[-1]
    assert skipped[0] == skipped[1]
    assert [part for part in expected if part not in skipped[0]] == []
