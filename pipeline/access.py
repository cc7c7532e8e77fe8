"""What file systems raise, as errors that name the place, the cause and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.errors import PipelineError


@contextmanager
def named_errors(
    where: str, *, key: str, invalid: type[PipelineError], failed: type[PipelineError] = PipelineError
) -> Iterator[None]:
    """Around calls of fsspec or the Hub, and nothing else: raises `invalid` where the configuration's `key` names no
    place that can be opened, and `failed` for all that a retry might heal. A FileNotFoundError passes.
    """
    try:
        yield
    except (FileNotFoundError, PipelineError):
        raise
    except (ImportError, ValueError) as error:  # fsspec knows no such protocol, the Hub no such name
        raise invalid(f"{key} is {where!r}, which cannot be opened: {error}. Check the path.") from error
    except Exception as error:  # OSError, httpx's, aiohttp's, google.auth's, botocore's: they share no other ancestor
        cause = str(error).rstrip(".") or type(error).__name__
        raise failed(f"{where} cannot be read: {cause}. Check access to it, and try again.") from error
