"""Checks addresses that users type: hides credentials, and refuses paths that can only be mistakes."""

import os
import re

_SECRET_NAMES = re.compile(
    "token|sig|signature|key|credential|pass|pwd|auth|secret|session|sas|jwt|bearer|cookie", re.IGNORECASE
)
# user:password@ before the host. The second alternative matches passwords with a slash, which no URL may contain.
_USER = re.compile(r"://[^/\s]*@|://[^/\s:@]+:(?!\d+(?:/|\s|$))\S{0,256}@")
_WORD = re.compile(r"\S+")
_PUNCTUATION = "'\"`)]}>,.:;"  # may follow a URL in a sentence

STORE_SCHEMES = ("gs", "s3", "file", "memory")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_NEARLY_URL = re.compile(
    r"(gs|gcs|s3|s3a|s3n|https?|ftps?|file|memory|hdfs|hf|abfss?|wasbs?|az|adl|sftp|ssh):/?(?!/)", re.I
)
HUB_SCHEME = "hf://"
HUB_REMEDY = "Fill a store at a local path, gs:// or s3://, and upload it with python -m pipeline.push."
# Control characters, a separator of Windows, and the ending of TensorStore's lock files.
_UNUSABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\\]|\.__lock(?=/|$)")
_CHOOSE = "Give a local path, gs://bucket/folder or s3://bucket/folder."


def has_credentials(address: str) -> bool:
    """Whether a URL contains a password, a signature or another secret."""
    if _USER.search(address):
        return True
    parameters = re.split(r"[?&;#]" if "://" in address else r"[?&]", address)[1:]
    named = (name for name, equals, _ in (part.partition("=") for part in parameters) if equals)
    return any(_SECRET_NAMES.search(name) for name in named if not re.search(r"\s", name))


def without_credentials(text: str) -> str:
    """Removes possible secrets from the URLs in a text: user and password, and everything after `?`, `#` or `;`."""
    return _WORD.sub(lambda word: _without_query(word[0]), _USER.sub("://***@", text))


def _without_query(word: str) -> str:
    scheme, separator, rest = word.partition("://")
    if not separator:
        return word
    place, *query = re.split("[?#;]", rest, maxsplit=1)
    end = word[len(word.rstrip(_PUNCTUATION)) :]
    is_hidden = query and query[0].rstrip(_PUNCTUATION)
    return f"{scheme}://{place}?***{end}" if is_hidden else word


def unusable_path(path: str, name: str) -> str | None:
    """Why `path` is not a valid path for files; None if it is. `name` is the subject of the message."""
    if not path.strip():
        return f"{name} is {path!r}. Give a folder or a file."
    if path != path.strip():
        return f"{name} is {path!r}, which begins or ends with whitespace. Remove it."
    try:
        path.encode()
    except UnicodeEncodeError:
        return f"{name} is {path!r}, which is not UTF-8. Choose another name."
    if wrong := _UNUSABLE.search(path):
        return f"{name} is {path!r}, which contains {wrong[0]!r}. Choose another name."
    if "://" not in path and (variable := re.search(r"\$(\w+|\{\w+\})", path)):
        return f"{name} is {path!r}, but the shell did not replace {variable[0]}. Remove the single quotes."
    if "://" not in path and os.path.expanduser(path).startswith("~"):
        return f"{name} is {path!r}, but there is no such user. For a folder of that name, write ./{path}."
    return None


def unusable_store_path(path: str) -> str | None:
    """Why a store cannot be created at `path`, and what to give instead; None if it can."""
    name, shown = "the store's path", repr(path)
    if has_credentials(path):
        return (
            f"{name} is {shown}: credentials in a URL would be logged. Provide them in the way that the storage's own "
            "tools expect (GOOGLE_APPLICATION_CREDENTIALS, AWS_PROFILE, ...)."
        )
    url = _URL.match(path)
    if path.startswith(HUB_SCHEME):
        return f"{name} is {shown}, on the Hub, where stores are read-only. {HUB_REMEDY}"
    if (url and url[1] not in STORE_SCHEMES) or (not url and _NEARLY_URL.match(path)):
        return f"{name} is {shown}, which has an unsupported URL scheme. {_CHOOSE}"
    if url and "|" in path:
        return f"{name} is {shown}: a store cannot be inside another file. {_CHOOSE}"
    return unusable_path(path, name)
