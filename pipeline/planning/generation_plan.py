"""What generation adds to a plan: rows, room, and the memory that it takes on each device. Pure arithmetic on ints."""

from dataclasses import dataclass
from typing import Protocol

from pipeline.cluster.topology import Topology
from pipeline.config.choices import Weights, WeightsDtype, When
from pipeline.config.schema import GenerateData, RunConfig
from pipeline.core.errors import ConfigError
from pipeline.models.architecture import Architecture
from pipeline.planning.mesh import divide_weights
from pipeline.store.format.layout import ITEM_BYTES, MIB


class GeneratorFacts(Protocol):
    """What is to be known of a model that generates; `pipeline.models.Model` is one."""

    arch: Architecture
    max_positions: int

    def generation_weight_bytes(self, dtype: str, with_int8: bool) -> tuple[int, int]:
        """Of the layers' matrices, and of all other weights; raises ConfigError for an encoder."""


@dataclass(frozen=True)
class GenerationPlan:
    """Bytes are of each device."""

    rows: int  # documents that are written at once, over all processes of the worker
    prompt_length: int
    max_new_tokens: int
    weights: Weights
    weights_bytes: int  # of all layers and the head
    cache_bytes: int  # keys and values of all rows
    logits_bytes: int  # of one step
    kept_bytes: int | None  # with capture.when=decode: activations of all rows
    notes: tuple[str, ...]

    def describe(self) -> str:
        """One line, for people."""
        return (
            f"generate  {self.rows} rows of {self.prompt_length} + {self.max_new_tokens} tokens; on each device "
            f"{self.weights_bytes / MIB:.0f} MiB of weights ({self.weights}), {self.cache_bytes / MIB:.1f} MiB of keys "
            f"and values, {self.logits_bytes / MIB:.1f} MiB of logits"
            + ("" if self.kept_bytes is None else f", {self.kept_bytes / MIB:.1f} MiB of activations")
        )


def plan_generation(
    config: RunConfig, model: GeneratorFacts, width: int, data: int, tensor: int, topology: Topology
) -> GenerationPlan | None:
    """The plan of `data=generate`, None for other data. `width`: features that are captured of a token. `data`,
    `tensor`: the mesh. Raises ConfigError."""
    options, keeps = config.data, config.capture.when is When.decode
    if not isinstance(options, GenerateData):
        if keeps:
            raise ConfigError("capture.when is decode, which is for data=generate. Set it to document.")
        return None
    _check(config, model, data)
    with_int8 = config.model.weights_dtype is WeightsDtype.int8
    of_model = model.generation_weight_bytes(str(config.model.dtype), with_int8)
    weights, weights_bytes, notes = divide_weights(config.model.weights, *of_model, data, tensor, topology)
    length = options.prompt_length + options.max_new_tokens
    itemsize = ITEM_BYTES[config.model.dtype]
    cache = cache_bytes(model.arch, options.rows, length, itemsize) // (data * tensor)
    kept = options.rows * length * width * itemsize // data if keeps else None
    logits = logits_bytes(model.arch, options.rows // data)
    beside = logits + (kept or 0)
    if topology.device_bytes is not None and weights_bytes + cache + beside > topology.device_bytes:
        raise ConfigError(
            f"to generate, weights, keys and values, and logits take {weights_bytes / MIB:.0f} + {cache / MIB:.0f} + "
            f"{beside / MIB:.0f} MiB on each device, which has {topology.device_bytes / MIB:.0f} MiB. Lower data.rows."
        )
    if config.batch.length < length:
        notes += (
            f"prompt and completion take up to {length} tokens: those longer than batch.length={config.batch.length} "
            "are stored in windows that do not see each other",
        )
    return GenerationPlan(
        rows=options.rows,
        prompt_length=options.prompt_length,
        max_new_tokens=options.max_new_tokens,
        weights=weights,
        weights_bytes=weights_bytes,
        cache_bytes=cache,
        logits_bytes=logits,
        kept_bytes=kept,
        notes=notes,
    )


def cache_bytes(arch: Architecture, rows: int, length: int, itemsize: int) -> int:
    """What the keys and values of all layers take, over all devices, for rows of `length` tokens."""
    return 2 * arch.num_layers * rows * arch.num_kv_heads * length * arch.head_dim * itemsize


def logits_bytes(arch: Architecture, rows: int) -> int:
    """What one step's logits take, in float32; sampling holds a few times as much."""
    return rows * arch.vocab_size * 4


def _check(config: RunConfig, model: GeneratorFacts, data: int) -> None:
    options = config.data
    for name in ("prompt_length", "max_new_tokens", "group"):
        if getattr(options, name) < 1:
            raise ConfigError(f"data.{name} is {getattr(options, name)}. Set it to at least 1.")
    if options.prompt_length + options.max_new_tokens > model.max_positions:
        raise ConfigError(
            f"data.prompt_length + data.max_new_tokens = {options.prompt_length} + {options.max_new_tokens} is more "
            f"than the model's {model.max_positions} positions. Lower one of them."
        )
    if options.rows < 1 or options.rows % data:
        raise ConfigError(
            f"data.rows = {options.rows} is not a multiple of the {data} devices that share the rows. Set it to a "
            f"multiple of {data}."
        )
    if config.model.weights_dtype is WeightsDtype.int8 and config.run.worker_count > 1:
        raise ConfigError(
            "model.weights_dtype=int8 with data=generate and several workers: the rounding's error is measured on the "
            "first stream, which only one of them generates. Set run.worker_count=1, or model.weights_dtype=same."
        )
    if config.run.claim:
        raise ConfigError(
            "run.claim is true, but data=generate writes a stream's completions in one process before it stores them. "
            "Set run.claim=false, and run.worker_count for several workers."
        )
