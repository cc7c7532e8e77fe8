"""Fixtures of the tests that read streams. Their modules have a fixture `stream` and a function `batches_of`."""

import pytest

from pipeline.library.stream import Stream
from pipeline.library.stream_reader import StreamReader
from pipeline.store.read.batches import Batch


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, stream: Stream) -> tuple[list[Batch], StreamReader]:
    """All batches of the module's stream, and their reader."""
    batches = request.module.batches_of(stream)
    return list(batches), batches


@pytest.fixture(scope="module")
def whole(ended: tuple[list[Batch], StreamReader]) -> list[Batch]:
    """All batches of the module's stream."""
    return ended[0]
