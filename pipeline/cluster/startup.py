"""Preparations of a command before other imports: handles signals, and makes failures to write messages harmless.

Imports take seconds, and an interruption in that time must not look like a crash.
"""

import atexit
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from pipeline.core.errors import EXIT_INTERRUPTED
from pipeline.core.messages import printable

_STDERR = 2
_CURSOR_MOVES = re.compile(r"\r?(\n*(\x1b\[A)+$)?")  # of progress bars, at the start of what they write


def prepare_process() -> None:
    """Makes SIGTERM and SIGINT end this process immediately with exit code 42, until a job installs its own handlers.
    Closed standard streams, or streams without a reader, no longer end the process."""
    _open_closed_streams()
    if not isinstance(sys.stderr, _Messages):
        sys.stderr = _Messages(sys.stderr, OSError)
        sys.stdout.reconfigure(line_buffering=True)  # so that errors are raised while the command runs
        sys.stdout = _Messages(sys.stdout, BrokenPipeError)  # other errors, such as a full disk, would lose a result
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup and in a shell's background jobs
            signal.signal(number, _exit)
            atexit.register(signal.signal, number, signal.SIG_IGN)  # at exit, Python would restore the default


def _exit(number: int, _frame: object) -> None:
    """Ends the process without cleanup, which is not needed before a job's loop."""
    name = signal.Signals(number).name
    with suppress(OSError):
        os.write(_STDERR, f"Interrupted: stopped by {name}. Run the same command again.\n".encode())
    os._exit(EXIT_INTERRUPTED)


def _open_closed_streams() -> None:
    """Opens closed standard streams, which are None in Python, as the null device.

    Otherwise the next opened file would get the file descriptor, and C++ libraries would log to that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  stays open


class _Messages:
    """A text stream that ignores some errors, so that failing to print a message does not end a job, and ends the
    command at others. It escapes the control characters in what it prints, except those of progress bars."""

    def __init__(self, stream: TextIO, ignored: type[OSError]) -> None:
        self._stream = stream
        self._ignored = ignored

    def write(self, text: str) -> int:
        moves = _CURSOR_MOVES.match(text)[0]
        with self._errors():
            self._stream.write(moves + printable(text[len(moves) :]))
        return len(text)

    def flush(self) -> None:
        with self._errors():
            self._stream.flush()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._ignored:
            pass
        except OSError as error:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  Python would flush it once more
            sys.exit(f"Standard output cannot be written: {error.strerror}.")

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
