import errno
import http.client
import json

import aiohttp
import pytest
from google.auth.exceptions import TransportError
from huggingface_hub.utils import httpx

from pipeline.core.errors import InputError, PipelineError
from pipeline.core.requests import named_errors


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (ImportError("no module s3fs"), InputError, "data.path is 'there', which cannot be opened: no module s3fs"),
        (ValueError("unknown protocol"), InputError, "data.path is 'there', .*: unknown protocol. Check the path"),
        (OSError(errno.ENAMETOOLONG, "File name too long"), InputError, "cannot be opened: File name too long"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory"), InputError, "Not a directory. Check the path"),
        (OSError(errno.EIO, "Input/output error"), PipelineError, "there cannot be read: .*Input/output.*try again"),
        (PermissionError(errno.EACCES, "Permission denied"), PipelineError, "there cannot be read: .*denied"),
        (TimeoutError(), PipelineError, "there cannot be read: TimeoutError. Check access to it, and try again"),
        (aiohttp.ClientPayloadError("cut"), PipelineError, "there cannot be read: cut"),
        (httpx.ReadTimeout("slow"), PipelineError, "there cannot be read: slow"),
        (TransportError("no token"), PipelineError, "there cannot be read: no token"),
        (http.client.IncompleteRead(b""), PipelineError, "there cannot be read: IncompleteRead"),
        (json.JSONDecodeError("Expecting value", "{", 1), PipelineError, "there cannot be read: Expecting value"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "half"), PipelineError, "there cannot be read: 'utf-8' codec"),
        (EOFError("early end"), PipelineError, "there cannot be read: early end"),
    ],
)
def test_errors_of_file_systems_name_the_file(error, expected, message):
    with (
        pytest.raises(PipelineError, match=message) as caught,
        named_errors("there", key="data.path", invalid=InputError),
    ):
        raise error
    assert type(caught.value) is expected


@pytest.mark.parametrize("kind", [AttributeError, TypeError, KeyError, AssertionError, RuntimeError, FileNotFoundError])
def test_programming_errors_are_not_converted(kind):
    error = kind("a mistake")
    with pytest.raises(kind) as caught, named_errors("there", key="data.path", invalid=InputError):
        raise error
    assert caught.value is error
