"""Makes prompts from tasks, and grades completions.

    input:
    <grid>
    output:
    <grid>
                       (an empty line between pairs)
    input:
    <test grid>
    output:
    <test grid>        (with include_solution, if it is known)

In a chat the user's message ends with the test grid, and the assistant's message is the rest.
"""

import re

import pyarrow as pa

from pipeline.data.arc.encoders import GridEncoder
from pipeline.data.arc.tasks import Grid, Task
from pipeline.data.documents import Document

_OUTPUT = "output:\n"

GRADES = pa.schema(
    [
        ("predicted_grid", pa.string()),  # as `grid_text`, augmented like the prompt; null if there is no grid
        ("correct", pa.bool_()),  # null if the solution is unknown
    ]
)


def chat_messages(task: Task, test: int, encoder: GridEncoder, *, include_solution: bool) -> list[dict[str, str]]:
    """The prompt as messages: the user's question and, if it is included and known, the assistant's answer."""
    pairs = [
        f"input:\n{encoder.encode(pair.input)}\n{_OUTPUT}{encoder.encode(pair.output)}\n\n" for pair in task.examples
    ]
    question = "".join(pairs) + f"input:\n{encoder.encode(task.tests[test].input)}"
    messages = [{"role": "user", "content": question}]
    solution = task.tests[test].output if include_solution else None
    if solution is not None:
        messages.append({"role": "assistant", "content": _OUTPUT + encoder.encode(solution)})
    return messages


def plain_prompt(task: Task, test: int, encoder: GridEncoder, *, include_solution: bool) -> str:
    """The whole prompt as one text. Without a solution it ends with the label of the output."""
    question, *answer = chat_messages(task, test, encoder, include_solution=include_solution)
    return f"{question['content']}\n{answer[0]['content'] if answer else _OUTPUT}"


def grid_text(grid: Grid) -> str:
    """A grid as lines of digits, independent of the prompt's encoder."""
    return "\n".join("".join(map(str, row)) for row in grid.tolist())


def grade(document: Document, completion: str, encoder: GridEncoder) -> dict[str, str | bool | None]:
    """The columns of `GRADES` for a document and its completion."""
    grid = _decode_answer(document.text, completion, encoder)
    predicted = None if grid is None else grid_text(grid)
    return {"predicted_grid": predicted, "correct": None if document.answer is None else predicted == document.answer}


def _decode_answer(prompt: str, completion: str, encoder: GridEncoder) -> Grid | None:
    """The grid in a completion; None if there is none.

    If the prompt ends with the output label, the completion must begin with the grid. Otherwise (in a chat) it is the
    grid after the completion's last output label that has one, or else at the completion's beginning.
    """
    begins = [label.end() for label in re.finditer(_OUTPUT, completion)]
    for begin in [0] if prompt.endswith(_OUTPUT) else [*reversed(begins), 0]:
        try:
            return encoder.decode_at(completion, begin)[0]
        except ValueError:
            continue
    return None
