"""Grids and tasks as text: encoders of grids, prompts, and grades of completions.

Every encoder has an exact decoder. Three settings determine a row: the symbols of the ten colours, how often a symbol
is repeated, and the separator of cells. Three more add text around the rows. With all of these, the grid
[[0, 1], [2, 3]] is

    ```grid
    shape: 2x2
    1 0 1
    2 2 3
    ```

A prompt is

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
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from pipeline.config.schema import ArcData
from pipeline.core.errors import ConfigError
from pipeline.data.arc.tasks import NUM_COLORS, Grid, Task
from pipeline.data.documents import Document

DIGITS = "0123456789"
_FRAMES = ("row_numbers", "shape_header", "code_block")
_NAMES = ("digits", "separated", "repeated", "symbols", *_FRAMES)

_OUTPUT = "output:\n"

GRADES = pa.schema(
    [
        ("predicted_grid", pa.string()),  # as `grid_text`, augmented like the prompt; null if there is no grid
        ("correct", pa.bool_()),  # null if the solution is unknown
    ]
)


@dataclass(frozen=True)
class GridEncoder:
    """symbols: `symbols[c]` is colour c. Raises ConfigError for symbols that cannot be decoded unambiguously."""

    symbols: str = DIGITS
    repeat: int = 1
    separator: str = ""
    row_numbers: bool = False
    shape_header: bool = False
    code_block: bool = False

    def __post_init__(self) -> None:
        usable = {symbol for symbol in self.symbols if symbol.isalnum() or not (symbol.isascii() or symbol.isspace())}
        if not len(self.symbols) == len(usable) == NUM_COLORS:
            raise ConfigError(
                f"data.symbols = {self.symbols!r}, expected {NUM_COLORS} different characters other than white "
                "space and ASCII punctuation. A combined character (some emoji) counts as several."
            )

    def encode(self, grid: Grid) -> str:
        """The grid's lines, without a newline at the end."""
        lines = [self.separator.join(self.symbols[color] * self.repeat for color in row) for row in grid.tolist()]
        if self.row_numbers:
            lines = [f"{number} {line}" for number, line in enumerate(lines, 1)]
        if self.shape_header:
            lines.insert(0, f"shape: {grid.shape[0]}x{grid.shape[1]}")
        if self.code_block:
            lines = ["```grid", *lines, "```"]
        return "\n".join(lines)

    def decode_at(self, text: str, begin: int) -> tuple[Grid, int]:
        """The grid whose text starts at `begin`, and the end of that text. Raises ValueError if there is none."""
        match = self._pattern.match(text, begin)
        if match is None:
            raise ValueError(f"no grid in {text[begin : begin + 40]!r}")
        lines = match["rows"].split("\n")
        if self.row_numbers:
            lines = [line.partition(" ")[2] for line in lines]
        cells = [line.split(self.separator) if self.separator else line[:: self.repeat] for line in lines]
        grid = np.array([[self.symbols.index(cell[0]) for cell in row] for row in cells], np.int8)
        if self.encode(grid) != match[0]:  # a wrong row number, or a wrong shape in the header
            raise ValueError(f"no grid in {match[0]!r}")
        return grid, match.end()

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        cell = "|".join(f"{re.escape(symbol)}{{{self.repeat}}}" for symbol in self.symbols)
        # A row must not be followed by a symbol or a letter, so that the beginning of a word is not taken for a row.
        end = rf"(?![\w{re.escape(self.symbols)}])"
        row = rf"{'[0-9]+ ' if self.row_numbers else ''}(?:{cell})(?:{re.escape(self.separator)}(?:{cell}))*{end}"
        header = r"shape: \d+x\d+\n" if self.shape_header else ""
        before, after = ("```grid\n", "\n```") if self.code_block else ("", "")
        return re.compile(rf"{before}{header}(?P<rows>{row}(?:\n{row})*){after}")


def grid_encoder(config: ArcData) -> GridEncoder:
    """The encoder for `data.encoder`: several of _NAMES, joined by `+`. Raises ConfigError for an unknown name."""
    names = config.encoder.split("+")
    if unknown := [name for name in names if name not in _NAMES]:
        raise ConfigError(f"data.encoder = {config.encoder}: {unknown[0]!r} is unknown, expected {', '.join(_NAMES)}.")
    return GridEncoder(
        symbols=config.symbols if "symbols" in names else DIGITS,
        repeat=2 if "repeated" in names else 1,
        separator=" " if "separated" in names else "",
        **{frame: frame in names for frame in _FRAMES},
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
