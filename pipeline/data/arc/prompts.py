"""Makes prompts from tasks, and reads the grid in a completion.

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
from collections.abc import Mapping

from pipeline.data.arc.encoders import GridEncoder
from pipeline.data.arc.tasks import Grid, Task

_LABEL = re.compile(r"(input|output):\n")


def question(task: Task, test: int, encoder: GridEncoder) -> str:
    """The examples and the test input."""
    pairs = [
        f"input:\n{encoder.encode(pair.input)}\noutput:\n{encoder.encode(pair.output)}\n\n" for pair in task.examples
    ]
    return "".join(pairs) + f"input:\n{encoder.encode(task.tests[test].input)}"


def answer(solution: Grid | None, encoder: GridEncoder) -> str:
    """The text after the question: the label, and the solution if it is known."""
    return "output:\n" if solution is None else f"output:\n{encoder.encode(solution)}"


def plain_prompt(task: Task, test: int, encoder: GridEncoder, *, include_solution: bool) -> str:
    """The whole prompt as one text."""
    solution = task.tests[test].output if include_solution else None
    return f"{question(task, test, encoder)}\n{answer(solution, encoder)}"


def chat_messages(task: Task, test: int, encoder: GridEncoder, *, include_solution: bool) -> list[Mapping[str, str]]:
    """The prompt as messages: the user's question and, if it is included and known, the assistant's answer."""
    messages = [{"role": "user", "content": question(task, test, encoder)}]
    solution = task.tests[test].output if include_solution else None
    if solution is not None:
        messages.append({"role": "assistant", "content": answer(solution, encoder)})
    return messages


def decode_answer(prompt: str, completion: str, encoder: GridEncoder) -> Grid | None:
    """The grid in a completion; None if there is none.

    If the prompt ends with the output label, the completion must begin with the grid. Otherwise (in a chat) it is the
    grid after the completion's last output label that has one, or else at the completion's beginning.
    """
    begins = [label.end() for label in _LABEL.finditer(completion) if label[1] == "output"]
    for begin in [0] if prompt.endswith("output:\n") else [*reversed(begins), 0]:
        try:
            return encoder.decode_at(completion, begin)[0]
        except ValueError:
            continue
    return None
