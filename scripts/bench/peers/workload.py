"""The workloads, and the interface of every extractor in the comparison. Imports nothing slow."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Workload:
    """A model, a text and a set of layers. The model runs `batch_rows` rows of `length` tokens at once."""

    name: str
    model: str  # its name on the Hub, and the directory below MODELS
    layers: tuple[int, ...]
    batch_rows: int
    length: int
    num_tokens: int  # approximate, since documents are whole; a run has whole steps, like almost all of a long run
    short_documents: bool = False  # 20-250 tokens each; otherwise whole multiples of `length`

    @property
    def directory(self) -> Path:
        return BUILD / "text" / self.name

    @property
    def checkpoint(self) -> Path:
        return MODELS / self.model


BUILD = Path("build/bench-peers")
MODELS = BUILD / "models"
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", "gpt2", (5,), batch_rows=8, length=256, num_tokens=24_576),
        Workload("W2", "gpt2", tuple(range(12)), batch_rows=8, length=256, num_tokens=12_288),
        Workload("W3", "gpt2", (5,), batch_rows=8, length=256, num_tokens=23_000, short_documents=True),
        Workload("W4", "Qwen/Qwen2.5-0.5B", (15,), batch_rows=2, length=1024, num_tokens=4_096),
    )
}


class Extractor(Protocol):
    """A tool in the comparison, with the model loaded and nothing computed."""

    def run(self, out: Path) -> int:
        """Writes activations of the text to files in the empty folder `out`. Returns the number of valid tokens."""
        ...

    def stored(self, out: Path) -> Iterator[np.ndarray]:
        """Each layer's activations from `run` in `out`: float32 [tokens, d], valid tokens in the text's order."""
        ...
