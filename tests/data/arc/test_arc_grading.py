"""Grading of grids in completions."""

import numpy as np
import pytest

from pipeline.config.schema import ArcData
from pipeline.data.arc.prompts import grade, grid_encoder, grid_text
from pipeline.data.documents import Document

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
