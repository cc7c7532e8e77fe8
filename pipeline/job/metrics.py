"""The metrics of a run: tokens, bytes, and the seconds that each thread spends in each stage.

Three threads run concurrently. The seconds of a thread's stages add up to its lifetime: the feed ends with its last
block, the loop and the writer end with the run. The binding stage is the one that the other threads wait for.
"""

import json
import os
import resource
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

import tensorstore as ts
from tqdm import tqdm

from pipeline.core.messages import counted

_INTERVAL_S = 10.0  # between lines of a run's log


class Stage(Enum):
    """What a thread does or waits for: the thread's name and the stage's label."""

    FEED_WORK = "feed", "work"  # reads, tokenises, packs
    FEED_FULL = "feed", "full"  # waits for the loop to take a block
    FEED_LEASE = "feed", "lease"  # searches or waits for a stream that no other process holds
    FEED_FINISH = "feed", "finish"  # has read its streams; waits until their blocks are written
    LOOP_DATA = "loop", "data"  # waits for the feed
    LOOP_BUDGET = "loop", "budget"  # waits until another step may be in flight
    LOOP_DISPATCH = "loop", "dispatch"
    LOOP_OTHERS = "loop", "others"  # has no rows left; waits for processes that have rows
    LOOP_PROFILE = "loop", "profile"  # starts or stops a trace
    LOOP_FINISH = "loop", "finish"  # waits for the writer at the end
    WRITER_IDLE = "writer", "idle"  # waits for a step
    WRITER_RESULTS = "writer", "results"  # waits for compute and device-to-host copies
    WRITER_COPY = "writer", "copy"  # copies into the buffers, or waits for the copying threads
    WRITER_STORE = "writer", "store"
    WRITER_METRICS = "writer", "metrics"

    def __init__(self, thread: str, label: str) -> None:
        self.thread, self.label = thread, label


BINDING = {
    Stage.LOOP_DATA: "reading and tokenising",
    Stage.FEED_LEASE: "leasing streams, or waiting for other processes' streams",
    Stage.WRITER_RESULTS: "compute and device-to-host copies",
    Stage.WRITER_COPY: "copying into host buffers",
    Stage.WRITER_STORE: "the store",
}


class Metrics:
    """Counts and seconds of one run. No lock is needed, since each thread writes only its own stages."""

    def __init__(
        self,
        *,
        total_tokens: int | None = None,
        stored_tokens: int = 0,
        progress: bool = False,
    ) -> None:
        """total_tokens, stored_tokens: of the progress bar."""
        self.tokens = 0
        self.steps = 0
        self.blocks = 0
        self.stored_bytes = 0
        self.seconds: Counter[Stage] = Counter()
        self.stages: dict[str, str] = {}  # the current stage of each thread
        self.last_step = time.monotonic()
        self._lines: list[str] = []
        self.name = f"{run_name()}.jsonl"
        self._started = self._emitted = time.monotonic()
        self._ended: float | None = None
        self._bar = tqdm(
            total=total_tokens,
            initial=stored_tokens,
            unit="tok",
            unit_scale=True,
            smoothing=0.1,
            desc="extract",
            disable=not progress,
            dynamic_ncols=True,
        )

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """Adds the duration of the `with` block to a stage."""
        began = time.monotonic()
        self.stages[stage.thread] = stage.label
        try:
            yield
        finally:
            self.stages[stage.thread] = "between stages"
            self.seconds[stage] += time.monotonic() - began

    def record_feed(self, work_s: float, wait_s: float) -> None:
        """Sets the seconds that the feed has worked and waited so far. Waiting for streams does not count as work."""
        self.seconds[Stage.FEED_WORK] = work_s - self._stream_waits_s
        self.seconds[Stage.FEED_FULL] = wait_s

    @property
    def _stream_waits_s(self) -> float:
        return self.seconds[Stage.FEED_LEASE] + self.seconds[Stage.FEED_FINISH]

    def thread_seconds(self, thread: str) -> dict[str, float]:
        """The seconds of a thread's stages, by label."""
        return {stage.label: self.seconds[stage] for stage in Stage if stage.thread == thread and stage in self.seconds}

    @property
    def elapsed_s(self) -> float:
        return (self._ended or time.monotonic()) - self._started

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.elapsed_s, 1e-9)

    def drained(self, tokens: int, tokens_of_job: int) -> None:
        """Counts one step whose activations have reached the host. The progress bar adds up all processes' tokens."""
        self.steps += 1
        self.tokens += tokens
        self.last_step = time.monotonic()
        self._bar.update(tokens_of_job)

    def committed(self, num_bytes: int) -> None:
        """Counts one committed block; `num_bytes` is the size of its rows' activations."""
        self.blocks += 1
        self.last_step = time.monotonic()
        self.stored_bytes += num_bytes

    def snapshot(self) -> dict[str, object]:
        """The current state as JSON values. Times are in seconds since the run began."""
        return {
            "unix_time": round(time.time(), 3),
            "elapsed_s": round(self.elapsed_s, 3),
            "steps": self.steps,
            "tokens": self.tokens,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "blocks": self.blocks,
            "stored_bytes": self.stored_bytes,
            "storage_retries": num_retries(),
            "storage_refused": num_refused(),
            "peak_rss_mib": peak_rss_mib(),
            "seconds": {
                thread: {label: round(seconds, 3) for label, seconds in self.thread_seconds(thread).items()}
                for thread in dict.fromkeys(stage.thread for stage in Stage)
            },
        }

    def is_due(self) -> bool:
        """Whether to log again: after the interval, or after 1 % of the elapsed time if that is longer."""
        return time.monotonic() - self._emitted >= max(_INTERVAL_S, self.elapsed_s / 100)

    def emit(self) -> bytes:
        """Adds a line to the run's log and returns the whole log as JSONL, since an object store cannot append."""
        self._emitted = time.monotonic()
        self._lines.append(json.dumps(self.snapshot()))
        return ("\n".join(self._lines) + "\n").encode()

    def close(self) -> None:
        """Closes the progress bar and stops the clock."""
        self._ended = time.monotonic()
        self._bar.close()

    def binding_stage(self) -> tuple[str, float]:
        """The stage that the other threads waited for longest, and the share of the elapsed time that they waited."""
        waits = {label: self.seconds[stage] for stage, label in BINDING.items()}
        waits[BINDING[Stage.LOOP_DATA]] -= self._stream_waits_s  # the loop waits for the feed meanwhile
        label = max(waits, key=waits.__getitem__)
        return label, waits[label] / max(self.elapsed_s, 1e-9)

    def summary(self) -> str:
        """The run in a few lines of text."""
        label, share = self.binding_stage()
        lines = [
            f"{self.tokens:,} tokens in {self.elapsed_s:.1f} s: {self.tokens_per_s:,.0f} tokens/s, "
            f"{counted(self.blocks, 'block')}, {self.stored_bytes / (1 << 20):,.1f} MiB stored",
            f"The bottleneck was {label}: the others waited for it {share:.0%} of the time.",
        ]
        if retries := num_retries():
            refused = num_refused()
            lines.append(f"{retries} requests to storage failed and were retried. {refused} responses were 429 or 503.")
        for thread in ("feed", "loop", "writer"):
            stages = ", ".join(f"{name} {value:.2f}" for name, value in self.thread_seconds(thread).items())
            lines.append(f"seconds of the {thread} thread: {stages}")
        return "\n".join(lines)


def num_retries() -> int:
    """How often this process has sent a failed request to `gs://` or `s3://` again."""
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/")
    return sum(metric["values"][0]["value"] for metric in metrics if metric["name"].endswith("/retries"))


def num_refused() -> int:
    """The number of HTTP responses 429 and 503 ("Slow Down" from S3): the service wants fewer requests, or is
    unavailable."""
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/http/response_codes")
    values = (value for metric in metrics for value in metric["values"])
    return sum(value["value"] for value in values if value["code"] in ("429", "503"))


def run_name() -> str:
    """A unique name for the run's log: time, host, process id and a random number of 12 digits.

    Containers may share host name and process id, and a process may start several runs in a second.
    """
    number = secrets.randbelow(10**12)
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{socket.gethostname()}-{os.getpid()}-{number:012}"


def peak_rss_mib() -> int:
    """The process's peak resident memory. On Linux `getrusage` would include the parent's memory before exec."""
    try:
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError:  # not Linux
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak // (1 << 20) if sys.platform == "darwin" else peak // 1024
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024
