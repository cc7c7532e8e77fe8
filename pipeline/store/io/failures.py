"""Failed operations of TensorStore and the file system: the error to raise, and its remedy.

TensorStore raises ValueError, as for mistakes in a program. The message of a failed operation begins with the name of a
status (except for INVALID_ARGUMENT) and ends with the operating system's error number, if there is one.
"""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.core.errors import StoreError, StoreInvalid

_FULL_REMEDY = "Free space, then run the same command again; it resumes."
VERIFY_REMEDY = "Run pipeline.verify to list all damage and how to repair it."
DAMAGE_REMEDY = "The object is damaged: run pipeline.verify to list all damage and how to repair it."
ROOT_REMEDY = "A store's root cannot be computed again: restore it from a copy, or set another store.path."


# The error, and its remedy, by the name of a status or the operating system's number.
_Cause = tuple[type[StoreError], str]
_PERMISSION = (StoreError, "Grant this user the permission, or choose a different store.path.")
_IN_THE_WAY = (StoreInvalid, "A file or a folder is in the way: choose a different store.path.")
_TRANSIENT = (StoreError, "Committed blocks stay valid. Once the cause is gone, run the same command again.")
_CAUSES: dict[str | int | None, _Cause] = {
    errno.EROFS: (StoreError, "Choose a different store.path, or make this one writable."),
    errno.ENOSPC: (StoreError, f"The disk is full. {_FULL_REMEDY}"),
    errno.EDQUOT: (StoreError, f"The quota is used up. {_FULL_REMEDY}"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, "PERMISSION_DENIED"), _PERMISSION),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST, errno.EISDIR), _IN_THE_WAY),
    errno.ENAMETOOLONG: (StoreInvalid, "Choose a shorter store.path."),
    errno.ELOOP: (StoreInvalid, "Choose a different store.path."),
    **dict.fromkeys(("DATA_LOSS", "OUT_OF_RANGE"), (StoreInvalid, DAMAGE_REMEDY)),  # bytes beyond the object's end
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
        cause, remedy = _CAUSES.get(error.errno, _TRANSIENT)
        raise cause(f"{subject}: {error}. {remedy}") from error
    except ValueError as error:
        text = str(error).partition(" [tensorstore_spec=")[0]
        if not (_STATUS.match(text) or _INVALID_ARGUMENT.match(text)):
            raise
        status, number = _STATUS.match(text), _ERRNO.search(text)
        by_status = _CAUSES.get(status and status[1])
        by_number = _CAUSES.get(number and int(number[1]))
        cause, remedy = by_status if by_status is _PERMISSION else by_number or by_status or _TRANSIENT
        raise cause(f"{subject}: {text}. {remedy}") from error
