"""Failed operations of TensorStore and the file system: the error to raise, and its remedy.

TensorStore raises ValueError, as for mistakes in a program. The message of a failed operation begins with the name of a
status (except for INVALID_ARGUMENT) and ends with the operating system's error number, if there is one.
"""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pipeline.core.errors import StoreError, StoreInvalid

_FULL_REMEDY = "Free space, then run the same command again; it resumes."
VERIFY_REMEDY = "Run pipeline.verify to list all damage and how to repair it."
DAMAGE_REMEDY = "The object is damaged: run pipeline.verify to list all damage and how to repair it."
ROOT_REMEDY = "A store's root cannot be computed again: restore it from a copy, or set another store.path."


class _Cause(NamedTuple):
    error: type[StoreError]
    remedy: str


_DAMAGE = _Cause(StoreInvalid, DAMAGE_REMEDY)
_PERMISSION = _Cause(StoreError, "Grant this user the permission, or choose a different store.path.")
_IN_THE_WAY = _Cause(StoreInvalid, "A file or a folder is in the way: choose a different store.path.")
_TRANSIENT = _Cause(StoreError, "Committed blocks stay valid. Once the cause is gone, run the same command again.")

_BY_ERRNO = {
    errno.EROFS: _Cause(StoreError, "Choose a different store.path."),
    errno.ENOSPC: _Cause(StoreError, f"The disk is full. {_FULL_REMEDY}"),
    errno.EDQUOT: _Cause(StoreError, f"The quota is used up. {_FULL_REMEDY}"),
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.ENOTDIR: _IN_THE_WAY,
    errno.EEXIST: _IN_THE_WAY,
    errno.EISDIR: _IN_THE_WAY,
    errno.ENAMETOOLONG: _Cause(StoreInvalid, "Choose a shorter store.path."),
    errno.ELOOP: _Cause(StoreInvalid, "Choose a different store.path."),
}
_BY_STATUS = {
    "PERMISSION_DENIED": _PERMISSION,
    "DATA_LOSS": _DAMAGE,
    "OUT_OF_RANGE": _DAMAGE,  # bytes beyond the object's end
}

_STATUSES = (
    "CANCELLED|UNKNOWN|DEADLINE_EXCEEDED|NOT_FOUND|ALREADY_EXISTS|PERMISSION_DENIED|RESOURCE_EXHAUSTED"
    "|FAILED_PRECONDITION|ABORTED|OUT_OF_RANGE|INTERNAL|UNAVAILABLE|DATA_LOSS|UNAUTHENTICATED"
)
_STATUS = re.compile(rf"({_STATUSES}): ")
_INVALID_ARGUMENT = re.compile(  # failed operations with this status; others with it are mistakes in the program
    r"Error (opening|reading|writing|deleting) |Failed to .*os_error_code=|.*HTTP response code", re.DOTALL
)
_ERRNO = re.compile(r"\[os_error_code='(\d+)'\]")


@contextmanager
def storage_errors(subject: str) -> Iterator[None]:
    """Turns a failure of TensorStore or the file system into a StoreError that names `subject`, the cause and a
    remedy; into a StoreInvalid if retrying cannot help.

    Enclose only the wait for the operation, since mistakes in the program must be raised unchanged.
    """
    try:
        yield
    except OSError as error:
        cause = _BY_ERRNO.get(error.errno, _TRANSIENT)
        raise cause.error(f"{subject}: {error}. {cause.remedy}") from error
    except ValueError as error:
        text = str(error).partition(" [tensorstore_spec=")[0]
        if not (_STATUS.match(text) or _INVALID_ARGUMENT.match(text)):
            raise
        cause = _cause(text)
        raise cause.error(f"{subject}: {text}. {cause.remedy}") from error


def _cause(text: str) -> _Cause:
    """The cause of a failure, from TensorStore's message."""
    status, number = _STATUS.match(text), _ERRNO.search(text)
    by_status = _BY_STATUS.get(status[1]) if status else None
    by_number = _BY_ERRNO.get(int(number[1])) if number else None
    return by_status if by_status is _PERMISSION else by_number or by_status or _TRANSIENT
