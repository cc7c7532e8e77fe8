"""The answer in a completion of an ARC prompt, and whether it is correct."""

import pyarrow as pa

from pipeline.data.arc.encoders import GridEncoder
from pipeline.data.arc.prompts import decode_answer
from pipeline.data.arc.tasks import Grid
from pipeline.data.documents import Document

GRADES = pa.schema(
    [
        ("predicted_grid", pa.string()),  # as `grid_text`, augmented like the prompt; null if there is no grid
        ("correct", pa.bool_()),  # null if the solution is unknown
    ]
)


def grid_text(grid: Grid) -> str:
    """A grid as lines of digits, independent of the prompt's encoder."""
    return "\n".join("".join(map(str, row)) for row in grid.tolist())


def grade(document: Document, completion: str, encoder: GridEncoder) -> dict[str, str | bool | None]:
    """The columns of `GRADES` for a document and its completion."""
    grid = decode_answer(document.text, completion, encoder)
    predicted = None if grid is None else grid_text(grid)
    return {"predicted_grid": predicted, "correct": None if document.answer is None else predicted == document.answer}
