"""Addresses that users type: credentials in them are never shown, and a place that nobody can mean is refused."""

import os
import re

_SECRET_NAMES = "token|sig|signature|key|credential|pass|pwd|auth|secret|session|sas|jwt|bearer|cookie"
# In front of the host: user:password@. The second form is of passwords with a slash, which no URL may have.
_USER = r"://[^/\s@]*@|://[^/\s:@]+:(?!\d+(?:/|\s|$))[^\s@]*@"
_CREDENTIALS = re.compile(rf"{_USER}|[?&;#][^=&;\s]*({_SECRET_NAMES})[^=&;\s]*=", re.IGNORECASE)
_SHOWN_USER = re.compile(_USER)
_SHOWN_QUERY = re.compile(r"(://[^\s?#;'\"]*)[?#;][^\s'\"]+")

STORE_SCHEMES = ("gs", "s3", "file", "memory")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_NEARLY_URL = re.compile(
    r"(gs|gcs|s3|s3a|s3n|https?|ftps?|file|memory|hdfs|hf|abfss?|wasbs?|az|adl|sftp|ssh):/?(?!/)", re.I
)
_CHOOSE = "Give a local path, gs://bucket/folder or s3://bucket/folder."


def has_credentials(address: str) -> bool:
    """Whether a URL has a password, a signature or the like in it."""
    return _CREDENTIALS.search(address) is not None


def without_credentials(text: str) -> str:
    """A text with what may be secret taken out of its URLs: user and password, and everything after `?`, `#` or `;`."""
    return _SHOWN_QUERY.sub(r"\1?***", _SHOWN_USER.sub("://***@", text))


def unusable_store_path(path: str) -> str | None:
    """Why nobody can mean this as a store's place, and what to give instead; None for a path that may be one."""
    shown = repr(path)
    if not path.strip():
        return f"the store's path is {shown}. {_CHOOSE}"
    if path != path.strip():
        return f"the store's path is {shown}, which begins or ends with a blank. Remove the blank."
    if "\0" in path:
        return f"the store's path is {shown}, which contains a NUL byte. {_CHOOSE}"
    try:
        path.encode()
    except UnicodeEncodeError:
        return f"the store's path is {shown}, which is not UTF-8. Choose another name."
    if has_credentials(path):
        return (
            f"the store's path is {shown}: credentials in a URL would be logged. Give them as the storage's own tools "
            "expect them (GOOGLE_APPLICATION_CREDENTIALS, AWS_PROFILE, ...)."
        )
    url = _URL.match(path)
    if (url and url[1] not in STORE_SCHEMES) or (not url and _NEARLY_URL.match(path)):
        return f"the store's path is {shown}, which has an unsupported URL scheme. {_CHOOSE}"
    if url and "|" in path:
        return f"the store's path is {shown}: a store is not inside of another file. {_CHOOSE}"
    if not url and os.path.expanduser(path).startswith("~"):
        return f"the store's path is {shown}, but there is no such user. Write ./{path} for a folder of that name."
    return None
