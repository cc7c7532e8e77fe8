"""What a completion answers to an ARC prompt, and whether that is right."""

import pyarrow as pa

from pipeline.data.arc.encoders import GridEncoder
from pipeline.data.arc.prompts import decode_answer
from pipeline.data.arc.tasks import Grid
from pipeline.data.documents import Document

GRADES = pa.schema(
    [
        ("predicted_grid", pa.string()),  # as `grid_text`, as augmented as the prompt; null: the completion has none
        ("correct", pa.bool_()),  # null: the solution is not known
    ]
)


def grid_text(grid: Grid) -> str:
    """A grid as lines of digits, whatever encoder the prompt has."""
    return "\n".join("".join(map(str, row)) for row in grid.tolist())


def grade(document: Document, completion: str, encoder: GridEncoder) -> dict[str, str | bool | None]:
    """The columns `GRADES` of a document and the text that follows it."""
    grid = decode_answer(document.text, completion, encoder)
    predicted = None if grid is None else grid_text(grid)
    return {"predicted_grid": predicted, "correct": None if document.answer is None else predicted == document.answer}
