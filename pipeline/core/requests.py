"""Requests to file systems, object storage and the Hub: repeated after transient failures, with errors that name the
path, the cause and the remedy.

The libraries behind gs://, s3:// and hf:// retry many of their requests for seconds; plain http(s) retries none. Since
an error ends all processes of a job, requests are retried here for minutes.
"""

import errno
import http.client
import json
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TypeVar

from huggingface_hub.errors import OfflineModeIsEnabled

from pipeline.core.errors import ConfigError, PipelineError
from pipeline.core.messages import shortened

log = logging.getLogger("pipeline")

ATTEMPTS = 9
_DELAY_S, _MAX_DELAY_S = 0.5, 30.0  # before the second attempt, doubled before each further one: 90 s in all
_MAX_ASKED_S = 310.0  # the longest wait that a server may ask for: the Hub's rate limits count over 5 minutes
_HTTP_PACKAGES = {"aiohttp", "httpcore", "httpx", "httpx2", "requests", "urllib3"}
_TRANSIENT_ERRNO = {errno.EIO, errno.ESTALE, errno.EBUSY, errno.EAGAIN, errno.EINTR}  # EBUSY: s3fs, where S3 is busy
_TRANSIENT_ERRNO |= {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EREMOTEIO}
# Packages behind fsspec and the Hub. Their errors share no ancestor, and not all of these packages are installed.
_NETWORK_PACKAGES = {
    *("adlfs", "aiobotocore", "aiohttp", "azure", "botocore", "fsspec", "gcsfs", "google"),
    *("httpcore", "httpx", "httpx2", "huggingface_hub", "requests", "s3fs", "urllib3"),
}
# The path itself is wrong: too long, through a file, a directory or a socket, or with circular links.
_INVALID_PATH = {errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO}
_MAY_PASS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ESTALE}
_MAY_PASS |= {errno.EACCES, errno.EPERM, errno.ETIMEDOUT, errno.EINTR, errno.EBUSY, errno.ENOMEM}

T = TypeVar("T")


def repeated(subject: str, call: Callable[[], T], should_repeat: Callable[[Exception], bool] | None = None) -> T:
    """Returns what `call` returns. Calls it again after failures that `should_repeat`, by default `is_transient`,
    accepts, and raises the last one. An error's `asked_s` is the time that the server asks to wait."""
    for attempt in count(1):
        try:
            return call()
        except Exception as error:
            if not (should_repeat or is_transient)(error):
                raise
            cause = error.__cause__ if isinstance(error, FileNotFoundError) else error
            if attempt == ATTEMPTS:
                raise cause from None
            delay_s = min(_DELAY_S * 2 ** (attempt - 1), _MAX_DELAY_S) * random.uniform(0.75, 1.25)
            delay_s = max(delay_s, min(getattr(error, "asked_s", 0.0), _MAX_ASKED_S))
            log.warning("%s: %s; retrying in %.1f s", subject, brief_cause(cause), delay_s)
            time.sleep(delay_s)
    raise AssertionError("the loop ends in a return or an exception")


def brief_cause(error: Exception) -> str:
    """An error's message in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def is_transient_status(status: int) -> bool:
    """Whether a retry may succeed after this HTTP status."""
    return status in (408, 429) or status >= 500


def is_transient(error: BaseException) -> bool:
    """Whether a request to storage may succeed when it is retried. One for a missing or forbidden object will not."""
    if isinstance(error, PipelineError | OfflineModeIsEnabled):  # the Hub's requests have been repeated
        return False
    if (status := _http_status(error)) is not None:
        return is_transient_status(status)
    if isinstance(error, FileNotFoundError):  # fsspec's HTTP raises it for every failure
        return error.__cause__ is not None and is_transient(error.__cause__)
    if isinstance(error, ConnectionError | TimeoutError | http.client.HTTPException):
        return True
    if type(error).__module__.partition(".")[0] in _HTTP_PACKAGES:
        return not isinstance(error, ValueError)
    return isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO


def _http_status(error: BaseException) -> int | None:
    """The status that the server answered: aiohttp, gcsfs, adlfs, and httpx or requests each say it elsewhere."""
    response = getattr(error, "response", None)
    names = ((error, "status"), (error, "code"), (error, "status_code"), (response, "status_code"))
    for status in (str(getattr(place, name, "")) for place, name in names):
        if status.isdecimal() and 400 <= int(status) < 600:
            return int(status)
    return None


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
