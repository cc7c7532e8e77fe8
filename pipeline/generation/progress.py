"""Counts, rates and the progress bar of generation."""

import json
import time

from tqdm import tqdm

from pipeline.core.counts import counted
from pipeline.generation.generator import Completion, Counts
from pipeline.job.metrics import run_name


class GenerationProgress:
    """Reports a generator's counts, and shows a progress bar. A watchdog can watch it."""

    def __init__(self, counts: Counts, *, progress: bool) -> None:
        self.last_step = self._started = time.monotonic()
        self.stages = {"loop": "generate"}
        self.name = f"{run_name()}-generate.json"
        self._counts = counts
        self._bar = tqdm(unit="tok", unit_scale=True, desc="generate", disable=not progress, dynamic_ncols=True)

    def step(self) -> None:
        """Call it before each segment."""
        self.last_step = time.monotonic()

    def completed(self, completion: Completion) -> None:
        self._bar.update(len(completion.tokens))

    def close(self) -> None:
        self._bar.close()

    def to_json(self) -> bytes:
        """This process's counts as JSON."""
        counts = vars(self._counts) | {"padding": round(self._counts.padding, 4)}
        return (json.dumps({"elapsed_s": round(self._elapsed_s, 3), **counts}) + "\n").encode()

    def summary(self) -> str:
        """The counts as one sentence."""
        counts = self._counts
        return (
            f"{counted(counts.prompts, 'prompt')} completed with {counts.tokens:,} tokens in {self._elapsed_s:.1f} s: "
            f"{counts.tokens / max(self._elapsed_s, 1e-9):,.0f} tokens/s; rows were idle in {counts.padding:.0%} of "
            f"their decoding steps"
        )

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started
