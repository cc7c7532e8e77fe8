"""A progress bar of a command."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def progress_bar(label: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr. Yields the function that shows how many units are done, and of how many."""
    with tqdm(unit=unit, desc=label, file=sys.stderr) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
