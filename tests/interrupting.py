"""Real SIGINTs at random moments of a loop over a reader, as from a notebook's stop button."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterable

from pipeline.store import Batch

AT_MOST_S = 30.0


def read_with_interruptions(
    reader: Iterable[Batch], moments: int, longest_s: float, seed: int
) -> tuple[list[Batch], int]:
    """The batches that loops over the reader receive until one loop ends by itself, and how many SIGINTs ended loops.

    Each loop is interrupted after a random time, up to `longest_s`, until there were `moments` interruptions.
    """
    received, interruptions, rng, is_over = [], 0, random.Random(seed), False
    deadline = time.monotonic() + AT_MOST_S + moments * longest_s
    while time.monotonic() < deadline:
        delay_s = rng.uniform(0, longest_s) if interruptions < moments else None
        done = threading.Event()

        def interrupt(delay_s: float = delay_s, done: threading.Event = done) -> None:
            if not done.wait(delay_s):
                os.kill(os.getpid(), signal.SIGINT)
            done.set()

        thread = threading.Thread(target=interrupt) if delay_s is not None else None
        try:
            try:
                if thread is not None:
                    thread.start()
                for batch in reader:
                    received.append(batch)
                is_over = True
            finally:
                done.set()
                if thread is not None:
                    thread.join()
        except KeyboardInterrupt:
            interruptions += 1
        if is_over:  # perhaps interrupted just after the loop
            return received, interruptions
    raise TimeoutError(f"not read in {AT_MOST_S} s after {interruptions} interruptions")
