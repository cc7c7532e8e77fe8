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


class Attempts:
    """Counts the attempts at one request, and waits between them."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self._failed = 0

    def again(self, cause: str, asked_s: float | None = None) -> bool:
        """Waits and returns True if another attempt is allowed; returns False at once after the last one. `asked_s`:
        the seconds to wait that the server asks for."""
        self._failed += 1
        if self._failed == ATTEMPTS:
            return False
        delay_s = min(_DELAY_S * 2 ** (self._failed - 1), _MAX_DELAY_S) * random.uniform(0.75, 1.25)
        if asked_s is not None:
            delay_s = max(delay_s, min(asked_s, _MAX_ASKED_S))
        log.warning("%s: %s; retrying in %.1f s", self.subject, cause, delay_s)
        time.sleep(delay_s)
        return True


def repeated(subject: str, call: Callable[[], T]) -> T:
    """Returns what `call` returns. Calls it again after transient failures, and raises the last one."""
    attempts = Attempts(subject)
    while True:
        try:
            return call()
        except Exception as error:
            if not is_transient(error):
                raise
            cause = error.__cause__ if isinstance(error, FileNotFoundError) else error
            if not attempts.again(brief_cause(cause)):
                raise cause from None


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
