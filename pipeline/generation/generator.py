"""Generates completions: when a row's completion ends, the row gets the next prompt.

The devices run segments of a fixed number of decoding steps without the host. Between two segments, the host reads
which rows have ended, yields their completions, and starts a prefill of the next prompts in these rows.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import jax
import numpy as np
from jaxtyping import Float, Int32

from pipeline.cluster.processes import largest_of_all
from pipeline.cluster.sharding import put_rows, row_sharding
from pipeline.core.errors import ConfigError, InputError
from pipeline.core.sites import ActivationKey
from pipeline.generation.decode import NewRows, Programs, State, compile_programs
from pipeline.generation.spec import GenerationSpec
from pipeline.models.decoder import Params
from pipeline.models.partition import Partition
from pipeline.models.registry import Model

log = logging.getLogger("pipeline")


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
    activations: Mapping[ActivationKey, Float[np.ndarray, "P+C D"]] | None  # for prompt and completion; None: no keys


@dataclass
class Counts:
    """The work of this process's rows. `row_steps` is the sum of decoding steps over rows, including idle ones."""

    prompts: int = 0
    tokens: int = 0  # in completions
    prefills: int = 0
    prefill_slots: int = 0  # token slots in prefills
    prompt_tokens: int = 0
    segments: int = 0
    row_steps: int = 0

    @property
    def padding(self) -> float:
        """The share of row steps without a new token. A completion's first token comes from the prefill."""
        return 1 - (self.tokens - self.prompts) / self.row_steps if self.row_steps else 0.0


@dataclass
class Generator:
    """Runs the compiled programs on this job's rows."""

    programs: Programs
    params: Params
    spec: GenerationSpec
    counts: Counts = field(default_factory=Counts)

    @property
    def rows(self) -> int:
        """The number of this process's rows."""
        return self.spec.rows // jax.process_count()

    @property
    def groups(self) -> int:
        """The number of groups of this process's rows: one per device along `data`."""
        return self.programs.mesh.shape["data"] // jax.process_count()

    def run(self, prompts: Iterator[Prompt], stop: Callable[[], bool] = lambda: False) -> Iterator[Completion]:
        """Yields completions in the order in which they end.

        All processes run the same number of prefills and segments until no process has an active row or a prompt left,
        so each must consume `run` to its end. Every process calls `stop` once before each segment, and all must get the
        same result; after True, incomplete rows are dropped.

        Raises InputError for a prompt that is empty or longer than `max_prompt`.
        """
        state: State = self.programs.empty()
        tenants: list[Prompt | None] = [None] * self.rows
        while not stop():
            prefills = list(self._next_prefills(prompts, tenants))
            num_prefills, num_tenants = largest_of_all(len(prefills), sum(tenant is not None for tenant in tenants))
            if num_tenants == 0:
                return
            for number in range(num_prefills):
                new = prefills[number] if number < len(prefills) else self._no_rows()
                inputs = put_rows(row_sharding(self.programs.mesh), new._asdict())
                state = self.programs.prefill(self.params, state, NewRows(**inputs))
            state, report = self.programs.segment(self.params, state)
            is_active, counts, completions = (
                _local_rows(array) for array in (report.is_active, report.counts, report.completions)
            )
            self.counts.prefills += num_prefills
            self.counts.prefill_slots += num_prefills * self.programs.new_rows.prompts.size // jax.process_count()
            self.counts.segments += 1
            self.counts.row_steps += int(report.steps) * self.rows
            for row, tenant in enumerate(tenants):
                if tenant is not None and not is_active[row]:
                    tenants[row] = None
                    yield self._completion(tenant, row, completions[row, : counts[row]], state)

    def _next_prefills(self, prompts: Iterator[Prompt], tenants: list[Prompt | None]) -> Iterator[NewRows]:
        """Prefills for free rows, until rows or prompts run out. Each prefill fills some rows of each device."""
        group_rows = self.rows // self.groups
        free = [
            [row for row in range(group_rows) if tenants[group * group_rows + row] is None]
            for group in range(self.groups)
        ]
        while any(free):
            new = self._no_rows()
            rows_per_group = len(new.rows) // self.groups
            num_new = 0
            for number in range(len(new.rows)):
                # Alternates between devices, so that a few prompts spread over all of them.
                slot, group = divmod(number, self.groups)
                if not free[group]:
                    continue
                prompt = next(prompts, None)
                if prompt is None:
                    break
                self._check(prompt)
                row, index = free[group].pop(0), group * rows_per_group + slot
                tenants[group * group_rows + row] = prompt
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
        new.rows[:] = self.rows // self.groups  # out of range: no prompt
        return new

    def _check(self, prompt: Prompt) -> None:
        if not 1 <= prompt.tokens.size <= self.spec.max_prompt:
            raise InputError(
                f"document {prompt.number} has a prompt of {prompt.tokens.size} tokens, "
                f"expected 1 to {self.spec.max_prompt}."
            )

    def _completion(self, prompt: Prompt, row: int, tokens: Int32[np.ndarray, " C"], state: State) -> Completion:
        self.counts.tokens += tokens.size
        length = prompt.tokens.size + tokens.size
        activations = {
            key: _local_row(kept, row)[:length] for key, kept in zip(self.spec.keys, state.activations, strict=True)
        }
        reason = "stop" if tokens[-1] in self.spec.end_tokens else "length"
        return Completion(prompt.number, tokens.copy(), reason, activations or None)


def compile_generator(model: Model, params: Params, partition: Partition, spec: GenerationSpec) -> Generator:
    """Compiles prefill and decoding.

    `params` are loaded from `model.generation.leaves(spec.keys)` and sharded by `partition`. Raises ConfigError for an
    encoder, and if prompt and completion do not fit the model's positions.
    """
    if min(spec.max_prompt, spec.max_new_tokens) < 1 or spec.length > model.max_positions:
        raise ConfigError(
            f"prompts of up to {spec.max_prompt} tokens and {spec.max_new_tokens} new tokens do not fit the model's "
            f"{model.max_positions} positions. Set each to at least 1, and their sum to at most {model.max_positions}."
        )
    programs = compile_programs(model, params, partition, spec)
    log.info("prefill: %s", programs.attention.describe())
    return Generator(programs, params, spec)


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
