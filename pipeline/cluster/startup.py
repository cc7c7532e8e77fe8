"""What a command does before it imports anything else: it heeds signals, and its messages cannot fail.

Imports take seconds, in which an interruption would be no different from a crash.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from pipeline.core.errors import EXIT_INTERRUPTED

_STDERR = 2


def prepare_process() -> None:
    """Until a job handles SIGTERM and SIGINT itself, they end this process at once with exit code 42. A standard
    stream that is closed, or whose reader has gone, ends nothing."""
    _open_closed_streams()
    if not isinstance(sys.stderr, _Messages):
        sys.stderr = _Messages(sys.stderr, OSError)
        sys.stdout = _Messages(sys.stdout, BrokenPipeError)  # a result that does not fit onto the disk is a failure
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and a shell's background jobs have it
            signal.signal(number, _exit)
            atexit.register(signal.signal, number, signal.SIG_IGN)  # Python's own end would take the default back


def _exit(number: int, _frame: object) -> None:
    """At once, as a kill would: nothing that is under way before a job's loop needs an end of its own."""
    name = signal.Signals(number).name
    with suppress(OSError):
        os.write(_STDERR, f"Interrupted: stopped by {name}. Run the same command again.\n".encode())
    os._exit(EXIT_INTERRUPTED)


@contextmanager
def signals_heeded_while_waiting() -> Iterator[None]:
    """While entered, `prepare_process`'s handlers act also where the main thread waits outside Python, for minutes
    perhaps: Python itself calls handlers only in between. Main thread only."""
    received, sent = os.pipe()
    os.set_blocking(sent, False)
    previous = signal.set_wakeup_fd(sent, warn_on_full_buffer=False)
    threading.Thread(target=_exit_when_sent, args=(received,), name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        os.close(sent)


def _exit_when_sent(received: int) -> None:
    while number := os.read(received, 1):
        if signal.getsignal(number[0]) is _exit:
            _exit(number[0], None)
    os.close(received)


def _open_closed_streams() -> None:
    """Python has None for a standard stream that is closed, and the next file that anything opens would get its
    number: what a library written in C++ logs to stderr would then be written into that file."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  as long as the process lives


class _Messages:
    """A text stream some of whose failures are left alone: messages and progress are worth no job."""

    def __init__(self, stream: TextIO, ignored: type[OSError]) -> None:
        self._stream = stream
        self._ignored = ignored

    def write(self, text: str) -> int:
        with suppress(self._ignored):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(self._ignored):
            self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
