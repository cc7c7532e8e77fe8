"""Reading, tokenising and packing in the background: one thread, a bounded queue, a fixed order."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pipeline.core.errors import PipelineError
from pipeline.data.documents import STREAM_START, Cursor, TokenBlock
from pipeline.data.stream import TokenStream

_CLOSE_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class StreamWork:
    """What is left to do of one stream: the arguments of `TokenStream.blocks`, and after how many tokens to end.

    `token_budget` cuts the block that exceeds it, `wanted` does not.
    """

    stream: TokenStream
    start: Cursor = STREAM_START
    index: int = 0
    token_budget: int | None = None
    wanted: int | None = None

    def blocks(self, should_stop: Callable[[], bool]) -> Iterator[TokenBlock]:
        num_tokens = 0
        for block in self.stream.blocks(self.start, self.index, self.token_budget, should_stop):
            num_tokens += block.num_tokens
            yield block
            if self.wanted is not None and num_tokens >= self.wanted:
                return

    def after(self, block: TokenBlock) -> "StreamWork | None":
        """What is left once `block`, the first of `blocks`, was given; None if nothing is."""
        if block.exhausted or block.truncated or (self.wanted is not None and block.num_tokens >= self.wanted):
            return None
        budget, wanted = (
            None if tokens is None else tokens - block.num_tokens for tokens in (self.token_budget, self.wanted)
        )
        return replace(self, start=block.next, index=block.index + 1, token_budget=budget, wanted=wanted)


class Work(Protocol):
    """Blocks to make, in order. Once `should_stop` says so, no block follows."""

    def blocks(self, should_stop: Callable[[], bool]) -> Iterator[TokenBlock]: ...


@dataclass(frozen=True)
class InTurn:
    """One block of each stream in turn. A stream that has ended loses its turn."""

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
        """What is left, in turn, once `block`, the first of `blocks`, was given. Streams before its own have ended."""
        turn = next(turn for turn, item in enumerate(self.work) if item.stream.stream == block.stream)
        left = self.work[turn].after(block)
        return InTurn((*self.work[turn + 1 :], *([] if left is None else [left])))


class Feed:
    """The blocks of `work`, in order, at most `depth` of them made ahead of `get`."""

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
        """The next block, or None, again and again, when there is none left.

        Raises TimeoutError when it takes longer than `timeout_s`: nothing is lost, the next call waits on. Raises what
        the thread raised, at the place in the order where it did, with its traceback.
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

    def close(self) -> None:
        """Ends the thread, which reads at most one more document. Later `get`s return None.

        A source that hangs is not waited for: after a second the thread is left to end with the process. The thread
        itself may call this, where it collects the feed's reader.
        """
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._ready.append(None)
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _produce(self, work: Work) -> None:
        self._resumed = time.perf_counter()
        try:
            for block in work.blocks(lambda: self._closed):
                self._put(block)
            self._put(None)
        except TimeoutError as error:  # one of the source's own: from `get` it would say that the block is to come
            failure = PipelineError(f"reading the data timed out: {error}. Check access to it, and try again.")
            failure.__cause__ = error
            self._put(failure)
        except BaseException as error:  # re-raised by `get` on the thread that reads
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
