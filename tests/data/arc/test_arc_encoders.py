from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.schema import ArcData
from pipeline.core.errors import ConfigError
from pipeline.data.arc.encoders import GridEncoder, grid_encoder

NAMES = [
    "+".join(name for name, used in zip(("symbols", "repeated", "separated"), chosen, strict=True) if used) or "digits"
    for chosen in product((False, True), repeat=3)
]
FRAMES = [
    dict(zip(("row_numbers", "shape_header", "code_block"), chosen, strict=True))
    for chosen in product((False, True), repeat=3)
]
SYMBOLS = ["abcdefghij", "9876543210", "ñò÷ûąćďęĚĎ", "⬛🟦🟥🟩🟨⬜🟪🟧🟫🔴"]


@st.composite
def grids(draw):
    height, width = draw(st.integers(1, 30)), draw(st.integers(1, 30))
    return np.random.default_rng(draw(st.integers(0, 2**32 - 1))).integers(0, 10, (height, width)).astype(np.int8)


@pytest.mark.parametrize("name", NAMES)
@given(grid=grids(), frame=st.sampled_from(FRAMES), symbols=st.sampled_from(SYMBOLS), repeat=st.integers(1, 3))
def test_decoding_inverts_encoding(name, grid, frame, symbols, repeat):
    encoder = grid_encoder(ArcData(source="arc", path="", encoder=name, symbols=symbols, repeat=repeat, **frame))
    decoded = encoder.decode(encoder.encode(grid))
    assert decoded.dtype == np.int8
    np.testing.assert_array_equal(decoded, grid)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "01\n23"),
        ({"encoder": "separated"}, "0 1\n2 3"),
        ({"encoder": "repeated", "repeat": 3}, "000111\n222333"),
        ({"encoder": "symbols", "symbols": "abcdefghij"}, "ab\ncd"),
        ({"encoder": "symbols+repeated+separated", "symbols": "abcdefghij"}, "aa bb\ncc dd"),
        ({"row_numbers": True}, "1 01\n2 23"),
        ({"shape_header": True}, "shape: 2x2\n01\n23"),
        ({"code_block": True}, "```grid\n01\n23\n```"),
        (
            {"encoder": "separated", "row_numbers": True, "shape_header": True, "code_block": True},
            "```grid\nshape: 2x2\n1 0 1\n2 2 3\n```",
        ),
    ],
)
def test_encodings_give_the_expected_texts(settings, text):
    assert grid_encoder(ArcData(source="arc", path="", **settings)).encode(np.array([[0, 1], [2, 3]], np.int8)) == text


@pytest.mark.parametrize(
    ("encoder", "text", "message"),
    [
        (GridEncoder(), "", "no grid"),
        (GridEncoder(), "12\n345", "rows of different lengths"),
        (GridEncoder(), "12\n3x", "text after the grid"),
        (GridEncoder(), "12\n", "text after the grid"),
        (GridEncoder(repeat=2), "112", "no grid"),
        (GridEncoder(repeat=2), "12", "no grid"),
        (GridEncoder(separator=" "), "1  2", "text after the grid"),
        (GridEncoder(row_numbers=True), "1 12\n3 34", "row 2 is labelled 3"),
        (GridEncoder(shape_header=True), "shape: 1x3\n12", "the header says 1x3, the grid is 1x2"),
        (GridEncoder(shape_header=True), "12", "no grid"),
        (GridEncoder(code_block=True), "```grid\n12", "no grid"),
    ],
)
def test_other_texts_are_refused(encoder, text, message):
    with pytest.raises(ValueError, match=message):
        encoder.decode(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoder": "hex"}, "data.encoder = hex: 'hex' is unknown, expected digits, separated, repeated, symbols"),
        ({"encoder": "symbols", "symbols": "abc"}, "data.symbols = 'abc', expected 10 different characters"),
        ({"encoder": "symbols", "symbols": "aacdefghij"}, "expected 10 different characters"),
        ({"encoder": "symbols", "symbols": "abcdefgh i"}, "other than white space"),
        ({"encoder": "symbols", "symbols": "abcdefgh:i"}, "ASCII punctuation"),
    ],
)
def test_unusable_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        grid_encoder(ArcData(source="arc", path="", **settings))
