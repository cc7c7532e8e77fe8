"""The workloads, and the interface that every extractor of this comparison has. Imports nothing heavy."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np


@dataclass(frozen=True)
class Workload:
    """One model, one text, one set of layers. `batch_rows` rows of `length` tokens go through the model at once."""

    name: str
    model: str  # its name on the Hub, and the directory below MODELS
    layers: tuple[int, ...]
    batch_rows: int
    length: int
    num_tokens: int  # about, since documents are whole; such that a run has whole steps, as nearly all of a long one
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
    """A tool under comparison, made ready: model loaded, nothing computed."""

    alignment: ClassVar[str]  # what of the text is kept beside the activations
    isolates: ClassVar[bool]  # whether documents cannot attend to each other

    def run(self, out: Path) -> int:
        """From the text to files in `out`, which is empty. Returns the valid tokens whose activations are there."""
        ...

    def stored(self, out: Path) -> Iterator[np.ndarray]:
        """Of each layer what `run` has put into `out`: float32 [tokens, d], valid tokens in the text's order."""
        ...
