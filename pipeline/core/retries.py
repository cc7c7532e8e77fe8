"""Retries of requests that fail for a transient reason, such as a busy service or a lost connection.

The libraries behind gs://, s3:// and hf:// retry many of their requests for seconds; plain http(s) retries none. Since
an error ends all processes of a job, requests are retried here for minutes.
"""

import errno
import http.client
import logging
import random
import time
from collections.abc import Callable
from itertools import count
from typing import TypeVar

from huggingface_hub.errors import OfflineModeIsEnabled

from pipeline.core.errors import PipelineError

log = logging.getLogger("pipeline")

ATTEMPTS = 9
_DELAY_S, _MAX_DELAY_S = 0.5, 30.0  # before the second attempt, doubled before each further one: 90 s in all
_MAX_ASKED_S = 310.0  # the longest wait that a server may ask for: the Hub's rate limits count over 5 minutes
_HTTP_PACKAGES = {"aiohttp", "httpcore", "httpx", "httpx2", "requests", "urllib3"}
_TRANSIENT_ERRNO = {errno.EIO, errno.ESTALE, errno.EBUSY, errno.EAGAIN, errno.EINTR}  # EBUSY: s3fs, where S3 is busy
_TRANSIENT_ERRNO |= {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EREMOTEIO}

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
