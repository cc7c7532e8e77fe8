"""Iterating over batches: a reader's position, which survives interruptions, and the states that contain it."""

import json
import logging
import operator
import os
import threading
import traceback
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Generic, NamedTuple, NoReturn, Self, TypeVar

from crc32c import crc32c

from pipeline.core.arguments import require_not_forked, shown
from pipeline.core.errors import ArgumentError

log = logging.getLogger("pipeline")

B = TypeVar("B")


class Position(NamedTuple):
    """A reader's position: after `batch` batches of epoch `epoch`; the next batch begins at `token` of `buffer`, which
    has this `begin`."""

    epoch: int = 0
    batch: int = 0
    buffer: int = 0
    token: int = 0
    begin: Any = None

    @property
    def numbers(self) -> dict[str, int]:
        """The position without `begin`, as JSON values."""
        return {name: getattr(self, name) for name in self._fields[:-1]}

    @classmethod
    def of(cls, state: Mapping[str, Any], begin: Any = None) -> "Position":
        """The inverse of `numbers`."""
        return cls(*(state[name] for name in cls._fields[:-1]), begin=begin)


class Reader(Iterator[B], Generic[B]):
    """Iterates over batches. One thread may use it at a time.

    All that a reader keeps is its position: after the last batch that `__next__` returned. Every `for` goes on from
    there, also after Ctrl-C, an error (which is raised again if it persists) or `close`. After a complete pass, the
    next `for` begins another one.
    """

    library = "TensorStore"  # what does not survive a fork

    def __init__(self, position: Position, end: int | None, epochs: int | None) -> None:
        """end: the epoch before which the pass ends; None for no end. epochs: per pass."""
        self._position = position
        self._end = end
        self._epochs = epochs
        self._batches: Iterator[tuple[B, Position]] | None = None
        self._is_complete = self._is_closed = False
        closed_at_end.add(self)

    @abstractmethod
    def _start(self) -> Iterator[tuple[B, Position]]:
        """The batches from the reader's position to the end of the pass, each with the position after it."""

    def __iter__(self) -> Self:
        if self._is_complete:
            begin, end = Position(self._end), self._end + self._epochs
            self._position, self._end, self._is_complete = begin, end, False
        self._is_closed = False
        return self

    def __next__(self) -> B:
        require_not_forked(self.library)
        if _main_has_ended.is_set():  # not the end of the pass, for a thread that goes on
            raise ArgumentError(
                "the main thread has ended, which closes all readers. Join the thread that uses this reader first."
            )
        if self._is_complete or self._is_closed:
            raise StopIteration
        # A signal may raise an exception after any call. Then this iterator is not used again, and the next one begins
        # at the position, which is set when nothing can keep the batch from being returned.
        batches, self._batches = self._batches, None
        try:
            batches = self._start() if batches is None else batches
            batch, after = next(batches, (None, None))
        except BaseException as error:
            batches = None
            traceback.clear_frames(error.__traceback__)  # a notebook keeps it, and with it the memory of buffers
            raise
        if after is None:
            self._is_complete = True
            raise StopIteration
        self._batches, self._position = batches, after
        return batch

    def close(self) -> None:
        """Ends the reader's threads after their current reads. Dropping the reader does the same."""
        batches, self._batches = self._batches, None
        self._is_closed = True
        if batches is not None:
            batches.close()

    def __reduce__(self) -> NoReturn:
        raise ArgumentError(
            f"a {type(self).__name__} cannot be copied or given to another process. Make a reader there, "
            "with this one's state() to go on."
        )


closed_at_end: weakref.WeakSet[Any] = weakref.WeakSet()  # readers, and the threads of those that were dropped
_main_has_ended = threading.Event()


def _end_readers() -> None:
    """Closes what is still referred to when the program ends."""
    _main_has_ended.set()
    for reader in list(closed_at_end):
        try:
            reader.close()
        except Exception as error:
            log.error("a reader that was open at the end of the program failed: %s", error)


# Before `concurrent.futures` ends its threads, which readers use, as it does in the same way. `atexit` is too late.
threading._register_atexit(_end_readers)
os.register_at_fork(after_in_child=closed_at_end.clear)


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """A reader's state with a checksum, as JSON values."""
    return {**state, "checksum": _checksum(state)}


def unsealed(state: object) -> dict[str, Any]:
    """The state that was sealed. Raises ArgumentError if it was changed, or is no state."""
    content = dict(state) if isinstance(state, Mapping) else {}
    try:
        is_intact = content.pop("checksum", None) == _checksum(content)
    except (TypeError, ValueError):  # not JSON
        is_intact = False
    if not is_intact:
        raise ArgumentError(
            f"state is {shown(state)}, not a state as a reader's state() returned it: it was changed or cut, or comes "
            "from an earlier version. Use an unchanged one, or start again without a state."
        )
    return content


def _checksum(content: Mapping[str, Any]) -> int:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False, default=operator.index)
    return crc32c(canonical.encode())
