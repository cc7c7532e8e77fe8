"""Reads, tokenises and packs in a background thread, with a bounded queue, in a fixed order; and how many documents
are needed for a number of tokens."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pipeline.config.choices import LongDocuments, Packing
from pipeline.core.errors import PipelineError
from pipeline.core.messages import counted
from pipeline.data.documents import STREAM_START, Cursor, TokenBlock
from pipeline.data.packing import windows
from pipeline.data.stream import TokenStream

_CLOSE_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class StreamWork:
    """The remaining work of one stream: the arguments of `TokenStream.blocks`, and the number of valid tokens that are
    still wanted (None: all). The block that reaches it is the last, and is whole."""

    stream: TokenStream
    start: Cursor = STREAM_START
    index: int = 0
    wanted: int | None = None

    def blocks(self, should_stop: Callable[[], bool]) -> Iterator[TokenBlock]:
        left: StreamWork | None = self
        for block in self.stream.blocks(self.start, self.index, should_stop):
            yield block
            left = left.after(block)
            if left is None:
                return

    def after(self, block: TokenBlock) -> "StreamWork | None":
        """The work that remains after `block`, the first of `blocks`; None if there is none."""
        wanted = None if self.wanted is None else self.wanted - block.num_tokens
        if block.exhausted or (wanted is not None and wanted <= 0):
            return None
        return replace(self, start=block.next, index=block.index + 1, wanted=wanted)


class Work(Protocol):
    """Makes blocks in order. Ends once `should_stop` returns true."""

    def blocks(self, should_stop: Callable[[], bool]) -> Iterator[TokenBlock]: ...


@dataclass(frozen=True)
class InTurn:
    """Alternates between streams: one block of each, in order. Streams that have ended are left out."""

    work: Sequence[StreamWork]

    def blocks(self, should_stop: Callable[[], bool]) -> Iterator[TokenBlock]:
        turns = deque(item.blocks(should_stop) for item in self.work)
        while turns and not should_stop():
            blocks = turns.popleft()
            block = next(blocks, None)
            if block is not None:
                turns.append(blocks)
                yield block

    def after(self, block: TokenBlock) -> "InTurn":
        """The work that remains after `block`, the first of `blocks`. Streams before the block's have ended."""
        turn = next(turn for turn, item in enumerate(self.work) if item.stream.stream == block.stream)
        remaining = self.work[turn].after(block)
        return InTurn((*self.work[turn + 1 :], *([] if remaining is None else [remaining])))


class Feed:
    """The blocks of `work`, in order. A thread makes at most `depth` of them ahead of `get`."""

    def __init__(self, work: Work, depth: int = 2) -> None:
        self._ready: deque[TokenBlock | BaseException | None] = deque()
        self._changed = threading.Condition()
        self._depth = depth
        self._closed = False
        self.producer_work_s = 0.0
        self.producer_wait_s = 0.0
        self._thread = threading.Thread(target=self._produce, args=(work,), name="feed", daemon=True)
        self._thread.start()

    def get(self, timeout_s: float | None = None) -> TokenBlock | None:
        """The next block; None in this and all later calls if there are no more.

        Raises TimeoutError if it takes longer than `timeout_s`; the next call then continues to wait for the same
        block. An exception of the thread is raised after the blocks before it, with its traceback.
        """
        with self._changed:
            is_ready = self._changed.wait_for(lambda: self._ready, timeout_s)
            if not is_ready:
                raise TimeoutError(f"no block within {timeout_s} s")
            item = self._ready[0]
            if isinstance(item, TokenBlock):
                self._ready.popleft()
                self._changed.notify_all()
                return item
        if item is not None:
            raise item
        return None

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Ends the thread, which reads at most one more document. Later calls of `get` return None.

        Waits for at most `timeout_s`, since a source may hang; the thread then ends with the process. The thread itself
        may call this, if it garbage-collects the feed's reader.
        """
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._ready.append(None)
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _produce(self, work: Work) -> None:
        self._resumed = time.perf_counter()
        try:
            for block in work.blocks(lambda: self._closed):
                self._put(block)
            self._put(None)
        except TimeoutError as error:  # from the source; raised by `get`, it would mean that the block is not ready yet
            failure = PipelineError(f"reading the data timed out: {error}. Check access to it, and try again.")
            failure.__cause__ = error
            self._put(failure)
        except BaseException as error:  # raised again by `get`
            self._put(error)

    def _put(self, item: TokenBlock | BaseException | None) -> None:
        began = time.perf_counter()
        self.producer_work_s += began - self._resumed
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
            self._resumed = time.perf_counter()
            self.producer_wait_s += self._resumed - began
            if not self._closed:
                self._ready.append(item)
                self._changed.notify_all()


class Demand:
    """Whether the added documents are all that is read for whole blocks with the tokens that are wanted.

    The last of these blocks begins before the wanted tokens are reached, and is packed after more pieces of documents
    are read than fit into it. So these are the wanted tokens and a whole block more, however the pieces are packed.
    """

    def __init__(self, stream: TokenStream, start: Cursor, wanted: int | None) -> None:
        """Of the documents from `start` on. wanted: None is never met."""
        self.has_limit = wanted is not None
        self._stream = stream
        is_pad = stream.packing is Packing.pad
        self._tokens = (wanted or 0) + (0 if is_pad else stream.rows_per_block * stream.length)
        self._pieces = stream.rows_per_block if is_pad else 0  # after these tokens
        self._first_token = start.token  # of the first document, at which the blocks begin

    def add(self, num_tokens: int) -> None:
        """Adds the next document."""
        stream, first_token, self._first_token = self._stream, self._first_token, 0
        is_cut = stream.long_documents is LongDocuments.cut
        for first, last in windows(num_tokens, stream.length, overlap=stream.overlap)[: 1 if is_cut else None]:
            if self._tokens > 0:
                self._tokens -= max(0, last - max(first, first_token))
            elif first >= first_token:
                self._pieces -= 1

    @property
    def is_met(self) -> bool:
        return self.has_limit and self._tokens <= 0 and self._pieces <= 0


def shortfall(stored: Sequence[int], budgets: Sequence[int]) -> str | None:
    """A message about streams of a finished store that have fewer tokens than their share; None if there are none.

    stored: each stream's tokens. budgets: each stream's share of `run.max_tokens`. The data of one stream may end
    early although that of others does not.
    """
    missing = [max(0, budget - tokens) for tokens, budget in zip(stored, budgets, strict=True)]
    if not any(missing):
        return None
    return (
        f"the data of {counted(sum(map(bool, missing)), 'stream')} ended {sum(missing):,} tokens short of "
        f"run.max_tokens={sum(budgets):,}. Use more data. If other streams have data left, use a new store with fewer "
        "streams (data.num_streams)."
    )
