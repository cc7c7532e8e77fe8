"""Grids as text, and the grading of grids in completions."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.schema import ArcData
from pipeline.core.errors import ConfigError
from pipeline.data.arc.prompts import GridEncoder, grade, grid_encoder, grid_text
from pipeline.data.documents import Document

PARTS = ("symbols", "repeated", "separated", "row_numbers", "shape_header", "code_block")
NAMES = [
    "+".join(name for name, used in zip(PARTS, chosen, strict=True) if used) or "digits"
    for chosen in product((False, True), repeat=len(PARTS))
]
SYMBOLS = ["abcdefghij", "9876543210", "ñò÷ûąćďęĚĎ", "⬛🟦🟥🟩🟨⬜🟪🟧🟫🔴"]


@st.composite
def grids(draw):
    height, width = draw(st.integers(1, 30)), draw(st.integers(1, 30))
    return np.random.default_rng(draw(st.integers(0, 2**32 - 1))).integers(0, 10, (height, width)).astype(np.int8)


def decode(encoder: GridEncoder, text: str) -> np.ndarray:
    """The inverse of `encode`."""
    grid, end = encoder.decode_at(text, 0)
    if end != len(text):
        raise ValueError("text after the grid")
    return grid


@given(name=st.sampled_from(NAMES), grid=grids(), symbols=st.sampled_from(SYMBOLS))
def test_decoding_inverts_encoding(name, grid, symbols):
    encoder = grid_encoder(ArcData(path="", encoder=name, symbols=symbols))
    decoded = decode(encoder, encoder.encode(grid))
    assert decoded.dtype == np.int8
    np.testing.assert_array_equal(decoded, grid)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "01\n23"),
        ({"encoder": "separated"}, "0 1\n2 3"),
        ({"encoder": "repeated"}, "0011\n2233"),
        ({"encoder": "symbols", "symbols": "abcdefghij"}, "ab\ncd"),
        ({"encoder": "symbols+repeated+separated", "symbols": "abcdefghij"}, "aa bb\ncc dd"),
        ({"encoder": "digits+row_numbers"}, "1 01\n2 23"),
        ({"encoder": "shape_header"}, "shape: 2x2\n01\n23"),
        ({"encoder": "code_block"}, "```grid\n01\n23\n```"),
        ({"encoder": "separated+row_numbers+shape_header+code_block"}, "```grid\nshape: 2x2\n1 0 1\n2 2 3\n```"),
    ],
)
def test_encodings_give_the_expected_texts(settings, text):
    assert grid_encoder(ArcData(source="arc", path="", **settings)).encode(np.array([[0, 1], [2, 3]], np.int8)) == text


@pytest.mark.parametrize(
    ("encoder", "text"),
    [
        *((GridEncoder(), text) for text in ("", "12\n345", "12\n3x", "12\n")),
        *((GridEncoder(repeat=2), text) for text in ("112", "12")),
        (GridEncoder(separator=" "), "1  2"),
        (GridEncoder(row_numbers=True), "1 12\n3 34"),
        *((GridEncoder(shape_header=True), text) for text in ("shape: 1x3\n12", "12")),
        (GridEncoder(code_block=True), "```grid\n12"),
    ],
)
def test_other_texts_are_refused(encoder, text):
    with pytest.raises(ValueError, match="no grid|inhomogeneous|text after"):
        decode(encoder, text)


@pytest.mark.parametrize("symbols", ["abc", "aacdefghij", "abcdefgh i", "abcdefgh:i"])
def test_unusable_settings_are_refused(symbols):
    with pytest.raises(ConfigError, match=f"data.symbols = '{symbols}', expected 10 different characters other than"):
        grid_encoder(ArcData(source="arc", path="", encoder="symbols", symbols=symbols))
    with pytest.raises(ConfigError, match="data.encoder = hex: 'hex' is unknown, expected digits, separated, repeated"):
        grid_encoder(ArcData(source="arc", path="", encoder="hex"))


PLAIN, CHAT = "input:\n3\noutput:\n", "[user]input:\n3[end]\n[assistant]"
ANSWER = grid_text(np.array([[1, 2], [3, 4]]))


@pytest.mark.parametrize(
    ("prompt", "completion", "predicted"),
    [
        (PLAIN, "12\n34", "12\n34"),
        (PLAIN, "12\n34\n\ninput:\n5\noutput:\n6\n", "12\n34"),
        (PLAIN, "12\n3", None),
        (PLAIN, "12\n35", "12\n35"),
        (PLAIN, "I think\noutput:\n12\n34", None),
        (PLAIN, "", None),
        (CHAT, "output:\n12\n34", "12\n34"),
        (CHAT, "12\n34", "12\n34"),
        (CHAT, "Not\noutput:\n99\nbut\noutput:\n12\n34\nis it.", "12\n34"),
        (CHAT, "The output:\nis hard to say.", None),
    ],
)
@pytest.mark.parametrize("answer", [ANSWER, None])
def test_grids_in_completions_are_graded(prompt, completion, predicted, answer):
    found = grade(Document("a#0", prompt, "a", 0, {}, answer), completion, grid_encoder(ArcData(path="")))
    assert found == {"predicted_grid": predicted, "correct": None if answer is None else predicted == ANSWER}


def test_a_prediction_is_digits_whatever_the_encoder():
    encoder = grid_encoder(ArcData(path="", encoder="symbols+separated", symbols="abcdefghij"))
    found = grade(Document("a#0", PLAIN, "a", 0, {}, ANSWER), "b c\nd e\n", encoder)
    assert found == {"predicted_grid": ANSWER, "correct": True}
