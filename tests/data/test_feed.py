import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import pyarrow as pa
import pytest
from material import assert_same_block, memory_source, text_stream, word_tokenizer, write_parquet

from pipeline.config.schema import ParquetData
from pipeline.core.errors import InputError, PipelineError
from pipeline.data.documents import Document
from pipeline.data.feed import Feed, InTurn, StreamWork
from pipeline.data.parquet import ParquetSource
from pipeline.data.stream import TokenStream
from pipeline.data.text.contexts import NOTHING

TOKENIZER = word_tokenizer()
LIMIT_S = 60  # for what takes milliseconds


def stream(source, number: int, num_streams: int) -> TokenStream:
    return text_stream(source, TOKENIZER, stream=number, num_streams=num_streams, rows_per_block=1, length=4)


def three_streams() -> list[TokenStream]:
    """One, three and two blocks of one row."""
    source = memory_source("/feed", [[[2] * 4] * 1, [[3] * 4] * 3, [[4] * 4] * 2])
    return [stream(source, number, 3) for number in range(3)]


def test_streams_take_turns_block_by_block():
    with closing(Feed(InTurn([StreamWork(one) for one in three_streams()]))) as feed:
        blocks = iter(feed.get, None)
        assert [(block.stream, block.index) for block in blocks] == [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (1, 2)]
        assert feed.get() is None


def test_a_feed_starts_at_the_works_cursor_and_ends_with_it():
    _, one, _ = three_streams()
    first, second, third = one.blocks()
    with closing(Feed(StreamWork(one, first.next, 1, wanted=4))) as feed:
        assert_same_block(feed.get(), second)
        assert feed.get() is None
    assert third.index == 2
    with closing(Feed(InTurn([]))) as feed:
        assert feed.get() is None


def bad_third_row() -> TokenStream:
    columns = {"text": pa.array(["w2 w3 w4 w5", "w6 w7 w8 w9", None]), "id": ["a", "b", "c"]}
    write_parquet("memory:///feed_bad/a.parquet", columns)
    return stream(ParquetSource(ParquetData(source="parquet", path="memory:///feed_bad")), 0, 1)


def test_an_error_is_raised_after_the_blocks_before_it_with_the_threads_traceback():
    with closing(Feed(StreamWork(bad_third_row()))) as feed:
        assert feed.get().index == 0
        for _ in range(2):
            with pytest.raises(InputError, match="row 2: 'text' is null") as caught:
                feed.get()
            assert "_produce" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_at_most_depth_blocks_are_read_ahead_and_waits_are_measured():
    with closing(Feed(StreamWork(three_streams()[1]), depth=1)) as feed:
        while not feed._changed._waiters:  # the thread has made the second block, and waits
            time.sleep(0.001)
        time.sleep(0.1)
        assert len(feed._ready) == 1
        assert [block.index for block in iter(feed.get, None)] == [0, 1, 2]
        assert feed.producer_wait_s >= 0.1


class SlowSource:
    """Endless documents, each after a call of `wait`."""

    shards = ("endless",)
    info_schema, added = pa.schema([]), NOTHING

    def __init__(self, wait) -> None:
        self._wait = wait
        self.num_read = 0

    def read(self, shard: int, start: int) -> Iterator[Document]:
        for index in count(start):
            self._wait()
            self.num_read += 1
            yield Document(str(index), "w2", "endless", index)

    def fingerprint(self) -> dict[str, object]:
        return {}


def large_block(source) -> TokenStream:
    return text_stream(source, TOKENIZER, rows_per_block=1000, length=1000)


def test_after_a_timeout_the_block_can_be_waited_for_again():
    release = threading.Event()
    with closing(Feed(StreamWork(stream(SlowSource(release.wait), 0, 1)))) as feed:
        for _ in range(2):
            with pytest.raises(TimeoutError, match=r"no block within 0.05 s"):
                feed.get(timeout_s=0.05)
        release.set()
        assert feed.get(timeout_s=LIMIT_S).index == 0
        assert feed.get(timeout_s=LIMIT_S).index == 1


def test_a_timeout_of_the_source_is_an_error():
    def fail():
        raise TimeoutError("the server is silent")

    with closing(Feed(StreamWork(large_block(SlowSource(fail))))) as feed:
        for _ in range(2):
            with pytest.raises(PipelineError, match="reading the data timed out: the server is silent.*try again"):
                feed.get(timeout_s=LIMIT_S)


def test_close_stops_reading_after_the_next_document():
    is_reading, release = threading.Event(), threading.Event()

    def wait() -> None:
        if source.num_read == 3:
            is_reading.set()
            release.wait()

    source = SlowSource(wait)
    feed = Feed(StreamWork(large_block(source)))
    assert is_reading.wait(LIMIT_S)
    feed.close()
    release.set()
    feed._thread.join(LIMIT_S)
    assert not feed._thread.is_alive()
    assert source.num_read == 4


def test_a_source_that_hangs_does_not_keep_the_process_alive():
    program = (
        "import time; from test_feed import Feed, SlowSource, StreamWork, large_block; "
        "feed = Feed(StreamWork(large_block(SlowSource(lambda: time.sleep(600))))); feed.close(); print('closed')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent, capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, b"closed\n"), done.stderr
