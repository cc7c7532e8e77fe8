"""Prompts in, completions out: rows whose completion has ended are given the next prompts.

The devices work in segments of a fixed number of decoding steps, without the host; between two segments the host reads
which rows have ended, hands out their completions and has the next prompts prefilled in their place.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import jax
import numpy as np
from jaxtyping import Float, Int32

from pipeline.cluster.processes import largest_of_all
from pipeline.cluster.sharding import put_rows, row_sharding
from pipeline.config.sampling import Sampling
from pipeline.core.errors import ConfigError, InputError
from pipeline.core.sites import ActivationKey
from pipeline.generation.decode import NewRows, Programs, State, compile_programs
from pipeline.models.decoder import Params
from pipeline.models.partition import Partition
from pipeline.models.registry import Model

log = logging.getLogger("pipeline")

SEGMENT_STEPS = 16  # decoding steps between two looks of the host; rows that end idle for half of them on average
_PREFILL_SHARE = 4  # a prefill has room for a quarter of the rows


@dataclass(frozen=True)
class Prompt:
    """A document that the model is to go on with; its completion depends on the seed and on these two alone."""

    number: int  # the document's
    tokens: Int32[np.ndarray, " P"]


@dataclass(frozen=True)
class Completion:
    """What the model said. `tokens` end with the end token if they end so; else there was no more room."""

    number: int
    tokens: Int32[np.ndarray, " C"]
    finish_reason: Literal["stop", "length"]
    activations: Mapping[ActivationKey, Float[np.ndarray, "P+C D"]] | None  # of prompt and completion; None: not asked


@dataclass
class Counts:
    """What this process's rows have done. `row_steps` counts each decoding step of each row, idle ones too."""

    prompts: int = 0
    tokens: int = 0  # of completions
    prefills: int = 0
    prefill_slots: int = 0  # tokens that prefills had room for
    prompt_tokens: int = 0
    segments: int = 0
    row_steps: int = 0

    @property
    def padding(self) -> float:
        """The share of decoding's row steps that gave no token; a completion's first token is the prefill's."""
        return 1 - (self.tokens - self.prompts) / self.row_steps if self.row_steps else 0.0


@dataclass
class Generator:
    """The compiled programs and the rows that they work on. `rows` are this process's."""

    programs: Programs
    params: Params
    rows: int
    groups: int  # of rows: this process's devices along `data`
    max_prompt: int
    max_new_tokens: int
    end_tokens: tuple[int, ...]
    keys: tuple[ActivationKey, ...]
    counts: Counts = field(default_factory=Counts)

    def run(self, prompts: Iterator[Prompt], stop: Callable[[], bool] = lambda: False) -> Iterator[Completion]:
        """The completions, in the order in which they end.

        Every process runs as many prefills and segments as the others, until no row of any is active and no prompts are
        left: all must use what `run` gives to its end. `stop` is asked once before each segment, by every process, and
        all must say the same; when it says so, what is not complete is dropped.

        Raises InputError for a prompt that is empty or longer than `max_prompt`.
        """
        prompts = iter(prompts)
        state: State = self.programs.empty()
        tenants: list[Prompt | None] = [None] * self.rows
        while not stop():
            prefills = list(self._next_prefills(prompts, tenants))
            num_prefills, num_tenants = largest_of_all(len(prefills), sum(each is not None for each in tenants))
            if num_tenants == 0:
                return
            for number in range(num_prefills):
                new = prefills[number] if number < len(prefills) else self._no_rows()
                inputs = put_rows(row_sharding(self.programs.mesh), new._asdict())
                state = self.programs.prefill(self.params, state, NewRows(**inputs))
            state, report = self.programs.segment(self.params, state)
            is_active, counts, completions = (
                _local_rows(each) for each in (report.is_active, report.counts, report.completions)
            )
            self.counts.prefills += num_prefills
            self.counts.prefill_slots += num_prefills * self._no_rows().prompts.size
            self.counts.segments += 1
            self.counts.row_steps += int(report.steps) * self.rows
            for row, tenant in enumerate(tenants):
                if tenant is not None and not is_active[row]:
                    tenants[row] = None
                    yield self._completion(tenant, row, completions[row, : counts[row]], state)

    def _next_prefills(self, prompts: Iterator[Prompt], tenants: list[Prompt | None]) -> Iterator[NewRows]:
        """Prompts for the free rows, as long as there are both; each prefill takes some of each device's rows."""
        of_group = self.rows // self.groups
        free = [
            [row for row in range(of_group) if tenants[group * of_group + row] is None] for group in range(self.groups)
        ]
        while any(free):
            new = self._no_rows()
            room = len(new.rows) // self.groups
            num_new = 0
            for place in range(len(new.rows)):
                # One row of each device in turn, so that few prompts are spread over all devices.
                slot, group = divmod(place, self.groups)
                if not free[group]:
                    continue
                prompt = next(prompts, None)
                if prompt is None:
                    break
                self._check(prompt)
                row, at = free[group].pop(0), group * room + slot
                tenants[group * of_group + row] = prompt
                new.prompts[at, : prompt.tokens.size] = prompt.tokens
                new.lengths[at] = prompt.tokens.size
                new.numbers[at] = divmod(prompt.number, 1 << 32)
                new.rows[at] = row
                num_new += 1
                self.counts.prompts += 1
                self.counts.prompt_tokens += prompt.tokens.size
            if num_new == 0:
                return
            yield new

    def _no_rows(self) -> NewRows:
        """This process's part of a prefill's inputs, without prompts."""
        processes = self.programs.mesh.shape["data"] // self.groups
        shapes = {
            name: (each.shape[0] // processes, *each.shape[1:])
            for name, each in self.programs.new_rows._asdict().items()
        }
        none = NewRows(
            **{name: np.zeros(shape, getattr(self.programs.new_rows, name).dtype) for name, shape in shapes.items()}
        )
        none.rows[:] = self.rows // self.groups  # a place that there is not
        return none

    def _check(self, prompt: Prompt) -> None:
        if not 1 <= prompt.tokens.size <= self.max_prompt:
            raise InputError(
                f"document {prompt.number} has a prompt of {prompt.tokens.size} tokens, "
                f"expected 1 to {self.max_prompt}."
            )

    def _completion(self, prompt: Prompt, row: int, tokens: Int32[np.ndarray, " C"], state: State) -> Completion:
        self.counts.tokens += tokens.size
        length = prompt.tokens.size + tokens.size
        activations = {
            key: _local_row(kept, row)[:length] for key, kept in zip(self.keys, state.activations, strict=True)
        }
        reason = "stop" if tokens[-1] in self.end_tokens else "length"
        return Completion(prompt.number, tokens.copy(), reason, activations or None)


def compile_generator(
    model: Model,
    params: Params,
    partition: Partition,
    *,
    rows: int,
    max_prompt: int,
    max_new_tokens: int,
    end_tokens: Sequence[int],
    sampling: Sampling,
    keys: Sequence[ActivationKey] = (),
    dtype: str = "float32",
    attention: str = "auto",
    segment_steps: int = SEGMENT_STEPS,
) -> Generator:
    """Compiles prefill and decoding for `rows` rows (global, a multiple of the devices along `data`).

    `params` are those of `model.generation.leaves(keys)`, placed as `partition` says. Activations of `keys` are taken
    while decoding, as `dtype`. Raises ConfigError for an encoder, and where prompt and completion do not fit the model.
    """
    data, num_processes = partition.mesh.shape["data"], jax.process_count()
    if max_prompt < 1 or max_new_tokens < 1 or max_prompt + max_new_tokens > model.max_positions:
        raise ConfigError(
            f"prompts of up to {max_prompt} tokens and {max_new_tokens} new ones do not fit the model's "
            f"{model.max_positions} positions. Set each to at least 1, and both together to at most that."
        )
    of_device = rows // data
    prefill_rows = data * max(1, of_device // _PREFILL_SHARE)
    programs = compile_programs(
        model,
        params,
        partition,
        rows=rows,
        prefill_rows=prefill_rows,
        max_prompt=max_prompt,
        max_new_tokens=max_new_tokens,
        end_tokens=end_tokens,
        sampling=sampling,
        keys=keys,
        dtype=dtype,
        attention=attention,
        segment_steps=segment_steps,
    )
    log.info("prefill: %s", programs.attention.describe())
    return Generator(
        programs=programs,
        params=params,
        rows=rows // num_processes,
        groups=data // num_processes,
        max_prompt=max_prompt,
        max_new_tokens=max_new_tokens,
        end_tokens=tuple(end_tokens),
        keys=tuple(keys),
    )


@jax.jit
def _row(values: jax.Array, row: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(values, row, keepdims=False)


def _own_shards(array: jax.Array) -> list[jax.Shard]:
    """This process's shards, each element once, in the order of rows."""
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    return sorted(shards, key=lambda shard: shard.index[0].start or 0)


def _local_rows(array: jax.Array) -> np.ndarray:
    """This process's rows of an array that is divided by rows only."""
    return np.concatenate([shard.data for shard in _own_shards(array)])


def _local_row(array: jax.Array, row: int) -> np.ndarray:
    """One of this process's rows [S, D]; its parts along D may lie on several devices."""
    shards = _own_shards(array)
    of_shard = shards[0].data.shape[0]
    first = (shards[0].index[0].start or 0) + row // of_shard * of_shard
    whole = np.empty(array.shape[1:], array.dtype)
    for shard in shards:
        if (shard.index[0].start or 0) == first:
            whole[shard.index[1:]] = _row(shard.data, np.int32(row % of_shard))
    return whole
