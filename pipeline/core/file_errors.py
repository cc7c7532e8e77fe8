"""Turns errors of file systems into PipelineErrors that name the path, the cause and the remedy."""

import errno
import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.core.errors import ConfigError, PipelineError
from pipeline.core.messages import shortened

_MAY_PASS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ESTALE}
_MAY_PASS |= {errno.EACCES, errno.EPERM, errno.ETIMEDOUT, errno.EINTR, errno.EBUSY, errno.ENOMEM}


@contextmanager
def named_writing_errors(where: str) -> Iterator[None]:
    """A context for writing local files. Raises ConfigError for a path that cannot be written, PipelineError where a
    retry might succeed, such as on a full disk. `where` is the setting, as it was given."""
    try:
        yield
    except OSError as error:
        if error.errno in _MAY_PASS:
            raise PipelineError(f"{where} cannot be written: {error}. Remove the cause, and try again.") from error
        raise ConfigError(f"{where} cannot be written: {error}. Choose another path.") from error


# Packages behind fsspec and the Hub. Their errors share no ancestor, and not all of these packages are installed.
_NETWORK_PACKAGES = {
    *("adlfs", "aiobotocore", "aiohttp", "azure", "botocore", "fsspec", "gcsfs", "google"),
    *("httpcore", "httpx", "httpx2", "huggingface_hub", "requests", "s3fs", "urllib3"),
}
# The path itself is wrong: too long, through a file, a directory or a socket, or with circular links.
_INVALID_PATH = {errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO}


@contextmanager
def named_errors(where: str, *, key: str, invalid: type[PipelineError]) -> Iterator[None]:
    """A context for calls of fsspec or the Hub, and nothing else. Raises `invalid` where the configuration's `key`
    cannot be opened, and PipelineError where a retry might succeed. FileNotFoundError and programming errors pass
    unchanged."""
    given = f"{key} is {shortened(repr(where), 200)}, which cannot be opened"
    try:
        yield
    except (FileNotFoundError, PipelineError):
        raise
    except (json.JSONDecodeError, UnicodeDecodeError) as error:  # a truncated response
        raise PipelineError(f"{where} cannot be read: {error}. Check access to it, and try again.") from error
    except (ImportError, ValueError) as error:  # a protocol that fsspec does not know, or a name that the Hub rejects
        raise invalid(
            f"{key} is {shortened(repr(where), 200)}, which cannot be opened: {error}. Check the path."
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _INVALID_PATH:
            raise invalid(f"{given}: {error.strerror}. Check the path.") from error
        if not _is_of_storage(error):
            raise
        cause = str(error).rstrip(".") or type(error).__name__
        raise PipelineError(f"{where} cannot be read: {cause}. Check access to it, and try again.") from error


def _is_of_storage(error: Exception) -> bool:
    """Whether the operating system, the network or a package for remote storage raised the error."""
    packages = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return isinstance(error, OSError | EOFError | http.client.HTTPException) or bool(packages & _NETWORK_PACKAGES)
