"""The step of a job, compiled for a TPU slice that is not there: does it compile, does it fit, what does it exchange.

Needs libtpu (the extra `tpu`), which describes slices and compiles for them on any machine.
"""

import collections
import importlib.util
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from jax.experimental import topologies

from pipeline.cluster.devices import is_out_of_memory
from pipeline.config.choices import WeightsDtype
from pipeline.config.schema import RunConfig
from pipeline.core.errors import ConfigError
from pipeline.models.registry import Model
from pipeline.planning.plan import Plan
from pipeline.planning.slice.chips import GIB, Slice
from pipeline.step.compiled_step import compile_step, make_partition

_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute|collective-broadcast)(?:-start)?\("
    r".* channel_id=(\d+)"
)

_LIBTPU_OPTIONS = {
    # What it would otherwise ask a TPU machine's metadata server for, and complain that nobody answers.
    **{"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-1"},
    **{"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
    # No chip is used, so another process may use libtpu at the same time.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


_REMEDY = (
    "Lower batch.rows (plan.search=true finds the most that fit), batch.length or run.max_inflight_mib, divide the "
    "weights (model.weights=fsdp), or take more or larger chips."
)


class DoesNotFit(ConfigError):
    """A program that needs more memory than a chip has."""


@dataclass(frozen=True)
class Program:
    """What the compiler says of the step. Bytes are of one chip, padded as its memory is laid out."""

    attention: str
    attention_note: str | None
    argument_bytes: int  # weights and one step's rows
    output_bytes: int  # one step's activations
    temporary_bytes: int
    peak_bytes: int  # while one step runs, what other steps have left aside
    collectives: dict[str, int]  # by kind; in a loop over layers it counts once
    compile_s: float

    def resident_bytes(self, steps_in_flight: int) -> int:
        """What a chip holds while one step runs and the activations of the others wait to be copied to the host."""
        return max(self.peak_bytes, self.argument_bytes + self.output_bytes + self.temporary_bytes) + (
            (steps_in_flight - 1) * self.output_bytes
        )


def slice_devices(where: Slice) -> Sequence[jax.Device]:
    """The devices of a slice, to compile for. Raises ConfigError where libtpu is missing or knows no such slice."""
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError("topology needs libtpu, which is not installed. Run pip install -e '.[tpu]'.")
    for name, value in _LIBTPU_OPTIONS.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")  # whatever this machine has, it is not used
    # One device per chip also of v4, where libtpu's default is one per core.
    options = {"chip_config_name": "megacore"} if where.chip.name == "v4" else {}
    try:
        description = topologies.get_topology_desc(where.name, platform="tpu", **options)
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(f"topology {where.name}: libtpu knows no such slice: {error}. Name another shape.") from error
    return description.devices


def compile_program(model: Model, plan: Plan, config: RunConfig, devices: Sequence[jax.Device]) -> Program:
    """Compiles the step that a run of this plan would compile. Raises DoesNotFit."""
    partition = make_partition(plan.mesh.tensor, plan.weights.sharding, devices)
    with_int8 = config.model.weights_dtype is WeightsDtype.int8
    params = model.abstract_params(plan.step.keys, str(config.model.dtype), partition.of_leaf, with_int8)
    began = time.perf_counter()
    try:
        step = compile_step(model, plan.step, params, partition)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0].partition("Ran out of memory")[2]
        raise DoesNotFit(
            f"the step of {plan.step.rows} rows of {plan.step.length} tokens does not fit: ran out of memory{reason} "
            f"{_REMEDY}"
        ) from error
    memory = step.executable.memory_analysis()
    return Program(
        attention=step.attention.name,
        attention_note=step.attention.note,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        collectives=_collectives(step.executable.as_text()),
        compile_s=time.perf_counter() - began,
    )


def _collectives(program_text: str) -> dict[str, int]:
    """By kind. One that is fused with what it overlaps stands several times in the text, with one channel."""
    channels = set(_COLLECTIVE.findall(program_text))
    return dict(collections.Counter(kind for kind, _ in channels))


def require_room(step_bytes: int, all_bytes: int, plan: Plan, where: Slice) -> None:
    """Raises DoesNotFit unless a chip can hold one step, and with it the activations of the others in flight."""
    available = where.chip.hbm_bytes
    if all_bytes > available:
        raise DoesNotFit(
            f"a step takes {step_bytes / GIB:.2f} GiB of a chip, and {all_bytes / GIB:.2f} with the activations of "
            f"{plan.memory.inflight_steps} steps in flight; {where.chip.name} has {available / GIB:.2f}. {_REMEDY}"
        )


def largest_power(fits: Callable[[int], bool], limit: int = 1 << 12) -> int:
    """The largest power of two up to `limit` that fits, found by bisection; 0 if 1 does not. What fits, fits halved."""
    low, high = -1, limit.bit_length()  # exponents: of what fits, and of what does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(1 << middle) else (low, middle)
    return 1 << low if low >= 0 else 0
