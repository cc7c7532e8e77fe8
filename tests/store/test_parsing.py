"""Edited JSON of a store gives one error that names it, never a traceback."""

import pytest

from pipeline.core.errors import StoreInvalid
from pipeline.core.json_text import MAX_DEPTH
from pipeline.store.io.parsing import parse_store_json


@pytest.mark.parametrize("text", [b"{}", b'[{"a": [1, 2.5, null, "\xc3\xa4\\u00e4"]}]', b"3", b"[" * 64 + b"]" * 64])
def test_json_is_read(text):
    assert parse_store_json(text, "a record") is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is not JSON: Expecting value"),
        (b'{"a": 1', "is not JSON"),
        (b"\xff\xfe\xfd", "is not JSON"),
        (b'"\xc3"', "is not JSON.*utf-8"),
        (b'{"name": "\\ud800"}', "is not JSON.*surrogates"),
        (b"1" * 5000, "is not JSON.*digits"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested too deeply, expected at most 64"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "nested too deeply, expected at most 64"),
        (b"[" * 10**6, "nested too deep"),
        (b'{"a":' * 10**6, "nested too deep"),
    ],
)
def test_text_that_is_not_json_is_refused(text, message):
    with pytest.raises(StoreInvalid, match=rf"^a record .*{message}.* run pipeline\.verify"):
        parse_store_json(text, "a record")
