"""Generates completions: when a row's completion ends, the row gets the next prompt.

The devices run segments of a fixed number of decoding steps without the host. Between two segments, the host reads
which rows have ended, yields their completions, and starts a prefill of the next prompts in these rows.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

import jax
import numpy as np
from jaxtyping import Float, Int32

from pipeline.cluster.processes import largest_of_all
from pipeline.cluster.sharding import put_rows, row_sharding
from pipeline.core.messages import counted
from pipeline.core.sites import ActivationKey
from pipeline.job.generation.decode import NewRows, Programs, State
from pipeline.models.decoder import Params


@dataclass(frozen=True)
class Prompt:
    """A document for the model to complete. The completion depends only on the seed and on these fields."""

    number: int  # the document's number
    tokens: Int32[np.ndarray, " P"]


@dataclass(frozen=True)
class Completion:
    """The tokens that the model generated. If `finish_reason` is "stop", the last one is an end token."""

    number: int
    tokens: Int32[np.ndarray, " C"]
    finish_reason: Literal["stop", "length"]
    activations: Mapping[ActivationKey, Float[np.ndarray, "P+C D"]]  # of the prompt's and the completion's tokens


@dataclass
class Counts:
    """The work of this process's rows. A watchdog can watch it."""

    prompts: int = 0
    tokens: int = 0  # in completions
    prefills: int = 0
    prefill_slots: int = 0  # token slots in prefills
    prompt_tokens: int = 0
    segments: int = 0
    row_steps: int = 0  # decoding steps, summed over rows, idle ones included

    def __post_init__(self) -> None:
        self.last_step = self._started = time.monotonic()
        self.stages = {"loop": "generate"}

    @property
    def padding(self) -> float:
        """The share of row steps without a new token. A completion's first token comes from the prefill."""
        return 1 - (self.tokens - self.prompts) / self.row_steps if self.row_steps else 0.0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def to_json(self) -> dict[str, float]:
        return {"elapsed_s": round(self.elapsed_s, 3), **asdict(self), "padding": round(self.padding, 4)}

    def __str__(self) -> str:
        return (
            f"{counted(self.prompts, 'prompt')} completed with {self.tokens:,} tokens in {self.elapsed_s:.1f} s: "
            f"{self.tokens / max(self.elapsed_s, 1e-9):,.0f} tokens/s; rows were idle in {self.padding:.0%} of "
            f"their decoding steps"
        )


@dataclass
class Generator:
    """Runs the compiled programs on this job's rows. This process's rows are divided over its devices along `data`."""

    programs: Programs
    params: Params
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self.spec, processes = self.programs.spec, jax.process_count()
        self._num_devices = self.programs.mesh.shape["data"] // processes
        self._device_rows = self.spec.rows // processes // self._num_devices

    def run(self, prompts: Iterator[Prompt], stop: Callable[[], bool] = lambda: False) -> Iterator[Completion]:
        """Yields completions in the order in which they end. Prompts have 1 to `max_prompt` tokens.

        All processes run the same number of prefills and segments until no process has an active row or a prompt left,
        so each must consume `run` to its end. Every process calls `stop` once before each segment, and all must get the
        same result; after True, incomplete rows are dropped.
        """
        state: State = self.programs.empty()
        tenants: list[Prompt | None] = [None] * (self._num_devices * self._device_rows)
        while not stop():
            self.counts.last_step = time.monotonic()
            prefills = list(self._next_prefills(prompts, tenants))
            num_prefills, num_tenants = largest_of_all(len(prefills), sum(tenant is not None for tenant in tenants))
            if num_tenants == 0:
                return
            for number in range(num_prefills):
                new = prefills[number] if number < len(prefills) else self._no_rows()
                inputs = put_rows(row_sharding(self.programs.mesh), new._asdict())
                state = self.programs.prefill(self.params, state, NewRows(**inputs))
            state, steps = self.programs.segment(self.params, state)
            is_active, counts, completions = map(_local_rows, (state.is_active, state.counts, state.completions))
            self.counts.prefills += num_prefills
            self.counts.prefill_slots += num_prefills * self.programs.new_rows.prompts.size // jax.process_count()
            self.counts.segments += 1
            self.counts.row_steps += int(steps) * len(tenants)
            for row, tenant in enumerate(tenants):
                if tenant is not None and not is_active[row]:
                    tenants[row] = None
                    yield self._completion(tenant, row, completions[row, : counts[row]], state)

    def _next_prefills(self, prompts: Iterator[Prompt], tenants: list[Prompt | None]) -> Iterator[NewRows]:
        """Prefills for free rows, until rows or prompts run out. Each prefill fills some rows of each device, in turns,
        so that a few prompts spread over all devices."""
        first_rows = range(0, len(tenants), self._device_rows)  # of each device
        free = [[row for row in range(self._device_rows) if tenants[first + row] is None] for first in first_rows]
        size = len(self._no_rows().rows) // self._num_devices  # of a device's part of a prefill
        for start in range(0, self._device_rows, size):
            slots = [(device, slot) for slot in range(size) for device in range(self._num_devices)]
            vacant = [(device, slot) for device, slot in slots if start + slot < len(free[device])]
            new, num_new = self._no_rows(), 0
            for (device, slot), prompt in zip(vacant, prompts, strict=False):
                row, index = free[device][start + slot], device * size + slot
                tenants[first_rows[device] + row] = prompt
                new.prompts[index, : prompt.tokens.size] = prompt.tokens
                new.lengths[index] = prompt.tokens.size
                new.numbers[index] = divmod(prompt.number, 1 << 32)
                new.rows[index] = row
                num_new += 1
                self.counts.prompts += 1
                self.counts.prompt_tokens += prompt.tokens.size
            if num_new == 0:
                return
            yield new

    def _no_rows(self) -> NewRows:
        """This process's part of a prefill's inputs, without any prompt."""
        new = jax.tree.map(
            lambda shape: np.zeros((shape.shape[0] // jax.process_count(), *shape.shape[1:]), shape.dtype),
            self.programs.new_rows,
        )
        new.rows[:] = self._device_rows  # out of range: no prompt
        return new

    def _completion(self, prompt: Prompt, row: int, tokens: Int32[np.ndarray, " C"], state: State) -> Completion:
        self.counts.tokens += tokens.size
        length = prompt.tokens.size + tokens.size
        activations = {
            key: _local_row(kept, row)[:length] for key, kept in zip(self.spec.keys, state.activations, strict=True)
        }
        reason = "stop" if tokens[-1] in self.spec.end_tokens else "length"
        return Completion(prompt.number, tokens.copy(), reason, activations)


@jax.jit
def _row(values: jax.Array, row: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(values, row, keepdims=False)


def _local_shards(array: jax.Array) -> list[jax.Shard]:
    """This process's shards, without replicas, in the order of rows."""
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    return sorted(shards, key=lambda shard: shard.index[0].start or 0)


def _local_rows(array: jax.Array) -> np.ndarray:
    """This process's rows of an array that is divided by rows only."""
    return np.concatenate([shard.data for shard in _local_shards(array)])


def _local_row(array: jax.Array, row: int) -> np.ndarray:
    """One of this process's rows [S, D], which may be divided over devices along D."""
    shards = _local_shards(array)
    shard_rows = shards[0].data.shape[0]
    first = (shards[0].index[0].start or 0) + row // shard_rows * shard_rows
    whole = np.empty(array.shape[1:], array.dtype)
    for shard in shards:
        if (shard.index[0].start or 0) == first:
            whole[shard.index[1:]] = _row(shard.data, np.int32(row % shard_rows))
    return whole
