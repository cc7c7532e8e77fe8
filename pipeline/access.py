"""What file systems raise, as errors that name the place, the cause and what to do."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.errors import ConfigError, PipelineError

_MAY_PASS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ESTALE}
_MAY_PASS |= {errno.EACCES, errno.EPERM, errno.ETIMEDOUT, errno.EINTR, errno.EBUSY, errno.ENOMEM}


@contextmanager
def named_writing_errors(where: str) -> Iterator[None]:
    """Around writing local files: raises ConfigError where the place cannot be one, PipelineError where a retry might
    succeed, as on a full disk. `where` is the setting, as it was given."""
    try:
        yield
    except OSError as error:
        if error.errno in _MAY_PASS:
            raise PipelineError(f"{where} cannot be written: {error}. Remove the cause, and try again.") from error
        raise ConfigError(f"{where} cannot be written: {error}. Choose another place.") from error


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
