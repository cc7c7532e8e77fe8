"""Generates completions: when rows' completions end, they get the next prompts.

The devices run segments of a fixed number of decoding steps without the host. Between two segments, the host reads
which rows have ended, yields their completions, and starts a prefill once enough rows for one are free.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int32

from pipeline.cluster.processes import largest_of_all
from pipeline.cluster.sharding import put_rows
from pipeline.core.messages import counted
from pipeline.core.sites import ActivationKey
from pipeline.job.generation.decode import NewRows, Programs, State
from pipeline.models.decoder import Params

_WORTHWHILE = 0.85  # the share of a prefill's prompts for which rows must be free, unless they are the last


@dataclass(frozen=True)
class Prompt:
    """A document for the model to complete. The completion depends only on the seed and on these fields."""

    number: int  # the document's number
    tokens: Int32[np.ndarray, " P"]


@dataclass(frozen=True)
class Completion:
    """The tokens that the model generated. If `finish_reason` is "stop", the last one is an end token, or the first
    with which a stop text occurs."""

    number: int
    tokens: Int32[np.ndarray, " C"]
    finish_reason: Literal["stop", "length"]
    activations: Mapping[ActivationKey, Float[np.ndarray, "P+C D"]]  # of the prompt's and the completion's tokens
    sample: int = 0
    score: float | None = None  # of beam search


class _Tenant(NamedTuple):
    """Whose completion a row computes. checked: the number of its tokens in which no stop text occurs."""

    prompt: Prompt
    sample: int
    checked: int = 0


@dataclass
class Counts:
    """The work of this process's rows. A watchdog can watch it."""

    prompts: int = 0
    completions: int = 0
    tokens: int = 0  # in completions
    prefills: int = 0
    prefill_slots: int = 0  # token slots in prefills
    prompt_tokens: int = 0
    segments: int = 0
    row_steps: int = 0  # decoding steps, summed over rows, idle ones included
    busy_steps: int = 0  # of these, those with new tokens, of ended completions

    def __post_init__(self) -> None:
        self.last_step = self._started = time.monotonic()
        self.stages = {"loop": "generate"}

    @property
    def padding(self) -> float:
        """The share of row steps without a new token."""
        return 1 - self.busy_steps / self.row_steps if self.row_steps else 0.0

    @property
    def tokens_per_step(self) -> float:
        """New tokens per busy step: above 1 with accepted proposals. A completion's first token comes from the
        prefill."""
        return (self.tokens - self.completions) / self.busy_steps if self.busy_steps else 1.0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def to_json(self) -> dict[str, float]:
        shares = {name: round(getattr(self, name), 4) for name in ("padding", "tokens_per_step")}
        return {"elapsed_s": round(self.elapsed_s, 3), **asdict(self), **shares}

    def __str__(self) -> str:
        filled = self.prompt_tokens / max(self.prefill_slots, 1)
        return (
            f"{counted(self.completions, 'completion')} with {self.tokens:,} tokens in {self.elapsed_s:.1f} s: "
            f"{self.tokens / max(self.elapsed_s, 1e-9):,.0f} tokens/s, {self.tokens_per_step:.2f} per row and step; "
            f"rows were idle in {self.padding:.0%} of their decoding steps; {filled:.0%} of prefill slots had tokens"
        )


@dataclass
class Generator:
    """Runs the compiled programs on this job's rows. This process's rows are divided over its devices along `data`."""

    programs: Programs
    params: Params
    # With how many tokens of a completion a stop text occurs; the second argument: with how many, none does.
    stop_at: Callable[[Int32[np.ndarray, " C"], int], int | None] = lambda tokens, checked: None
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self.spec, processes = self.programs.spec, jax.process_count()
        self._num_devices = self.programs.mesh.shape["data"] // processes
        self._device_rows = self.spec.rows // processes // self._num_devices
        # Of a prefill, on each device.
        self._device_prompts = self.programs.new_rows.lengths.shape[0] // processes // self._num_devices

    def run(self, prompts: Iterator[Prompt], stop: Callable[[], bool] = lambda: False) -> Iterator[Completion]:
        """Yields completions in the order in which they end. Prompts have 1 to `max_prompt` tokens.

        All processes run the same number of prefills and segments until no process has an active row or a prompt left,
        so each must consume `run` to its end. Every process calls `stop` once before each segment, and all must get the
        same result; after True, incomplete rows are dropped.
        """
        state: State = self.programs.empty()
        tenants: list[_Tenant | None] = [None] * (self._num_devices * self._device_rows)
        waiting: deque[Prompt] = deque()
        while not stop():
            self.counts.last_step = time.monotonic()
            wanted = self._wanted_prefills(prompts, waiting, tenants)
            num_prefills, num_left = largest_of_all(wanted, len(waiting) + len(tenants) - tenants.count(None))
            if num_left == 0:
                return
            for _ in range(num_prefills):
                new = self._next_prefill(waiting, tenants)
                inputs = put_rows(self.programs.mesh, new._asdict())
                state = self.programs.prefill(self.params, state, NewRows(**inputs))
            state, steps = self.programs.segment(self.params, state)
            self._read_ahead(prompts, waiting, self._num_devices * self._device_prompts)  # while devices compute
            self.counts.prefills += num_prefills
            self.counts.prefill_slots += num_prefills * self.programs.new_rows.prompts.size // jax.process_count()
            self.counts.segments += 1
            self.counts.row_steps += int(steps) * len(tenants)
            completions, state = self._ended(state, tenants)
            yield from completions

    def _ended(self, state: State, tenants: list[_Tenant | None]) -> tuple[list[Completion], State]:
        """Frees the rows whose completions have ended. Returns these, and the state, in which those that a stop text
        ends are not continued."""
        ends = {name: _local_rows(getattr(state, name)) for name in ("is_active", "has_ended")}
        counts, steps, texts = (_local_rows(getattr(state, name)) for name in ("counts", "steps", "text"))
        was_active, is_changed, ended = ends["is_active"].copy(), False, []
        for row, tenant in enumerate(tenants):
            if tenant is None:
                continue
            tokens = texts[row, tenant.prompt.tokens.size :][: counts[row]]
            stop = self.stop_at(tokens, tenant.checked)
            if stop == tokens.size and self.spec.keys and was_active[row]:
                ends["has_ended"][row] = is_changed = True  # its last token has no activations yet
            elif stop is not None or not was_active[row]:
                is_changed |= bool(was_active[row])
                ends["is_active"][row], tenants[row] = False, None
                self.counts.busy_steps += int(steps[row])
                ended.append(self._completion(tenant, row, tokens[:stop], stop is not None, state))
            else:
                tenants[row] = tenant._replace(checked=tokens.size)
        return ended, state._replace(**put_rows(self.programs.mesh, ends)) if is_changed else state

    def _wanted_prefills(self, prompts: Iterator[Prompt], waiting: deque[Prompt], tenants: list[_Tenant | None]) -> int:
        """How many prefills are worth their time: those that are nearly full, or that start the last prompts."""
        vacant = np.array([len(rows) // self.spec.samples for rows in self._free_rows(tenants)])
        self._read_ahead(prompts, waiting, vacant.sum())
        is_last, num_left, number = len(waiting) < vacant.sum(), len(waiting), 0
        while num_left > 0:
            size = int(vacant.clip(0, self._device_prompts).sum())
            if size == 0 or (size < _WORTHWHILE * self._num_devices * self._device_prompts and not is_last):
                break
            vacant, num_left, number = vacant - self._device_prompts, num_left - size, number + 1
        return number

    def _next_prefill(self, waiting: deque[Prompt], tenants: list[_Tenant | None]) -> NewRows:
        """A prefill of the next prompts, as far as rows are free. It fills rows of each device in turns, so that a few
        prompts spread over all devices."""
        new, size, samples = self._no_rows(), self._device_prompts, self.spec.samples
        free = self._free_rows(tenants)
        places = ((device, slot) for slot in range(size) for device in range(self._num_devices))
        for device, slot in places:
            if not waiting or len(free[device]) < samples:
                continue
            prompt, index = waiting.popleft(), device * size + slot
            rows, free[device] = free[device][:samples], free[device][samples:]
            for sample, row in enumerate(rows):
                tenants[device * self._device_rows + row] = _Tenant(prompt, sample)
            new.prompts[index, : prompt.tokens.size] = prompt.tokens
            new.lengths[index] = prompt.tokens.size
            new.numbers[index] = divmod(prompt.number, 1 << 32)
            new.rows[index] = rows
            self.counts.prompts += 1
            self.counts.prompt_tokens += prompt.tokens.size
        return new

    def _free_rows(self, tenants: list[_Tenant | None]) -> list[list[int]]:
        """The free rows of each device."""
        first_rows = range(0, len(tenants), self._device_rows)
        return [[row for row in range(self._device_rows) if tenants[first + row] is None] for first in first_rows]

    def _read_ahead(self, prompts: Iterator[Prompt], waiting: deque[Prompt], wanted: int) -> None:
        waiting.extend(islice(prompts, max(0, wanted - len(waiting))))

    def _no_rows(self) -> NewRows:
        """This process's part of a prefill's inputs, without any prompt."""
        new = jax.tree.map(
            lambda shape: np.zeros((shape.shape[0] // jax.process_count(), *shape.shape[1:]), shape.dtype),
            self.programs.new_rows,
        )
        new.rows[:] = self._device_rows  # out of range: no prompt
        return new

    def _completion(
        self, tenant: _Tenant, row: int, tokens: Int32[np.ndarray, " C"], is_stopped: bool, state: State
    ) -> Completion:
        self.counts.completions += 1
        self.counts.tokens += tokens.size
        length = tenant.prompt.tokens.size + tokens.size
        activations = {
            key: _local_row(kept, row)[:length] for key, kept in zip(self.spec.keys, state.activations, strict=True)
        }
        score = None if state.beams is None else float(_local_rows(state.beams.scores)[row])
        reason = "stop" if is_stopped or tokens[-1] in self.spec.end_tokens else "length"
        return Completion(tenant.prompt.number, tokens.copy(), reason, activations, tenant.sample, score)


@jax.jit
def _row(values: jax.Array, row: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(values, row, keepdims=False)


def _local_shards(array: jax.Array) -> list[jax.Shard]:
    """This process's shards, without replicas, in order."""
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    return sorted(shards, key=lambda shard: [part.start or 0 for part in shard.index])


def _local_rows(array: jax.Array) -> np.ndarray:
    """This process's rows of an array that is divided by rows only."""
    return np.concatenate([shard.data for shard in _local_shards(array)])


def _local_row(array: jax.Array, row: int) -> np.ndarray:
    """One of this process's rows [S, D], which may be divided over devices along D."""
    shards = _local_shards(array)
    shard_rows, _, width = shards[0].data.shape
    number, num_parts = row // shard_rows, array.shape[2] // width
    parts = shards[number * num_parts : (number + 1) * num_parts]
    return np.concatenate([_row(part.data, np.int32(row % shard_rows)) for part in parts], axis=1)
