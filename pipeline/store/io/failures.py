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


class _Cause(NamedTuple):
    error: type[StoreError]
    remedy: str


_DAMAGE = _Cause(StoreInvalid, DAMAGE_REMEDY)
_PERMISSION = _Cause(StoreError, "Grant this user the permission, or choose a different store.path.")
_FILE_IN_THE_WAY = _Cause(StoreInvalid, "A file is in the way: choose a different store.path.")
_TRANSIENT = _Cause(StoreError, "Committed blocks stay valid. Once the cause is gone, run the same command again.")

_BY_ERRNO = {
    errno.EROFS: _Cause(StoreError, "Choose a different store.path."),
    errno.ENOSPC: _Cause(StoreError, f"The disk is full. {_FULL_REMEDY}"),
    errno.EDQUOT: _Cause(StoreError, f"The quota is used up. {_FULL_REMEDY}"),
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.ENOTDIR: _FILE_IN_THE_WAY,
    errno.EEXIST: _FILE_IN_THE_WAY,
    errno.EISDIR: _Cause(StoreInvalid, "A folder is in the way: choose a different store.path."),
    errno.ENAMETOOLONG: _Cause(StoreInvalid, "Choose a shorter store.path."),
    errno.ELOOP: _Cause(StoreInvalid, "Choose a different store.path."),
}
_BY_STATUS = {
    "DATA_LOSS": _DAMAGE,
    "OUT_OF_RANGE": _DAMAGE,  # bytes beyond the object's end, or rows beyond the array's
}
_BY_STATUS_OF_OPENING = {  # when an array is opened
    "NOT_FOUND": _DAMAGE,
    "FAILED_PRECONDITION": _Cause(
        StoreInvalid,
        "The array was edited: delete its zarr.json (the next run writes a new one), or change store.path.",
    ),
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
_OPENING_ARRAY = re.compile(rf'(({_STATUSES}): )?Error opening "zarr3"')
_READING_SHARD = re.compile(rf"(({_STATUSES}): )?Error reading shard")


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
        cause = _PERMISSION if text.startswith("PERMISSION_DENIED: ") else _cause(text)
        raise cause.error(f"{subject}: {text}. {cause.remedy}") from error


def _cause(text: str) -> _Cause:
    """The cause of a failure, from TensorStore's message."""
    number = _ERRNO.search(text)
    if number and int(number[1]) in _BY_ERRNO:
        return _BY_ERRNO[int(number[1])]
    match = _STATUS.match(text)
    status = match and match[1]
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if _READING_SHARD.match(text):
        return _DAMAGE
    return _BY_STATUS_OF_OPENING.get(status, _TRANSIENT) if _OPENING_ARRAY.match(text) else _TRANSIENT
