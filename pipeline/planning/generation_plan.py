"""What generation adds to a plan: rows, lengths, and the memory that it needs on each device."""

from dataclasses import dataclass, replace

from pipeline.cluster.topology import Topology
from pipeline.config.choices import Weights, When
from pipeline.config.schema import GenerateData, RunConfig
from pipeline.core.errors import ConfigError
from pipeline.core.sites import Site
from pipeline.models.architecture import Architecture, Part
from pipeline.models.weight_specs import has_site
from pipeline.planning.mesh import largest_tensor
from pipeline.planning.model_facts import ModelFacts
from pipeline.planning.weights import MAX_WEIGHTS_SHARE, WeightsPlan, plan_weights
from pipeline.store.format.layout import ITEM_BYTES, MIB


@dataclass(frozen=True)
class GenerationPlan:
    """The plan of generation. Bytes are per device."""

    rows: int  # documents generated at the same time, over all processes of the job
    tensor: int  # devices that share heads, neurons and vocabulary; may be more than in extraction
    prompt_length: int
    max_new_tokens: int
    weights: WeightsPlan  # all layers and the head
    cache_bytes: int  # keys and values of all rows
    logits_bytes: int  # of one step
    kept_bytes: int | None  # activations of all rows, with capture.when=decode
    notes: tuple[str, ...]  # including those of `weights`

    def describe(self) -> str:
        """One line, for people."""
        return (
            f"generate  {self.rows} rows of {self.prompt_length} + {self.max_new_tokens} tokens; tensor {self.tensor}; "
            f"on each device {self.weights.device_bytes / MIB:.0f} MiB of weights ({self.weights.sharding}), "
            f"{self.cache_bytes / MIB:.1f} MiB of keys and values, {self.logits_bytes / MIB:.1f} MiB of logits"
            + ("" if self.kept_bytes is None else f", {self.kept_bytes / MIB:.1f} MiB of activations")
        )


def plan_generation(
    config: RunConfig, model: ModelFacts, width: int, tensor: int, topology: Topology
) -> GenerationPlan | None:
    """The plan of `data=generate`; None for other data.

    `width` is the number of features captured per token; `tensor` is the size of the tensor axis in extraction, and the
    minimum for generation. Raises ConfigError for a configuration that cannot work or does not fit in a device.
    """
    options, keeps_activations = config.data, config.capture.when is When.decode
    if not isinstance(options, GenerateData):
        return None
    tensor, weights = _divide_weights(config, model, tensor, topology)
    data = topology.devices // tensor
    _require_valid(config, model, data)
    length = options.prompt_length + options.max_new_tokens
    itemsize = ITEM_BYTES[config.model.dtype]
    is_int8 = options.has_int8_cache
    cache = cache_bytes(model.arch, options.rows, length, itemsize, is_int8) // (data * tensor)
    kept = options.rows * length * width * itemsize // data if keeps_activations else None
    logits = logits_bytes(model.arch, options.rows // data)
    others = logits + (kept or 0)
    if topology.device_bytes is not None and weights.device_bytes + cache + others > topology.device_bytes:
        raise ConfigError(
            f"generation needs {weights.device_bytes / MIB:.0f} MiB for weights, {cache / MIB:.0f} MiB for keys and "
            f"values, and {others / MIB:.0f} MiB for logits{'' if kept is None else ' and kept activations'} on each "
            f"device, which has "
            f"{topology.device_bytes / MIB:.0f} MiB. Lower data.rows."
        )
    notes = weights.notes
    if config.batch.length < length:
        notes += (
            f"a prompt with its completion has up to {length} tokens: if longer than "
            f"batch.length={config.batch.length}, it is split into windows that do not attend to each other",
        )
    return GenerationPlan(
        rows=options.rows,
        tensor=tensor,
        prompt_length=options.prompt_length,
        max_new_tokens=options.max_new_tokens,
        weights=weights,
        cache_bytes=cache,
        logits_bytes=logits,
        kept_bytes=kept,
        notes=notes,
    )


def _divide_weights(config: RunConfig, model: ModelFacts, tensor: int, topology: Topology) -> tuple[int, WeightsPlan]:
    """The number of devices along `tensor`, and the division of the weights.

    A larger `tensor` is preferred to fsdp: a decoding step reads every weight for few tokens, so fsdp would gather the
    whole model in each step.
    """
    with_int8, notes = config.model.has_int8_weights, ()
    sizes, memory = model.generation.weight_bytes(str(config.model.dtype), with_int8), topology.device_bytes
    most = largest_tensor(topology, model.tensor_dims)
    is_auto = config.model.weights is Weights.auto and memory is not None
    if is_auto and tensor < most and sizes.on_device(tensor) > MAX_WEIGHTS_SHARE * memory:
        tensor = most
        notes = (f"the weights are large, so generation divides them over {tensor} devices along tensor",)
    plan = plan_weights(config.model.weights, sizes, topology.devices // tensor, tensor, memory)
    if plan.sharding is Weights.fsdp:
        remedy = "" if with_int8 else ", or model.weights_dtype=int8"
        gathered = sizes.on_device(tensor) - plan.device_bytes
        notes += (
            f"with fsdp, each decoding step gathers {gathered / MIB:.0f} MiB of weights on each device, which is slow: "
            f"use devices with more memory, or more devices per process{remedy}",
        )
    return tensor, replace(plan, notes=plan.notes + notes)


def cache_bytes(arch: Architecture, rows: int, length: int, itemsize: int, is_int8: bool) -> int:
    """Bytes of all layers' caches, over all devices, for rows of `length` tokens: keys and values (int8 with float32
    scales), and for a DeltaNet the last inputs of its convolutions and its float32 states."""
    num_delta = sum(Part.delta in arch.blocks(layer).parts for layer in range(arch.num_layers))
    cached = 0
    for layer in range(arch.num_layers):
        if has_site(arch, layer, Site.k):
            sizes = arch.with_sizes_of(layer)
            width = sizes.head_dim + sizes.value_dim
            cached += sizes.num_kv_heads * length * (width + 2 * 4 if is_int8 else width * itemsize)
    if arch.delta is not None:
        keys, values = arch.delta.key_dim, arch.delta.values_per_key * arch.delta.value_dim
        conv_bytes = (arch.delta.num_taps - 1) * (2 * keys + values) * itemsize
        cached += num_delta * arch.delta.num_heads * (conv_bytes + keys * values * 4)
    return rows * cached


def logits_bytes(arch: Architecture, rows: int) -> int:
    """Bytes of one step's logits in float32. Sampling needs a few times as much."""
    return rows * arch.vocab_size * 4


def _require_valid(config: RunConfig, model: ModelFacts, data: int) -> None:
    options = config.data
    if options.prompt_length + options.max_new_tokens > model.max_positions:
        raise ConfigError(
            f"data.prompt_length + data.max_new_tokens = {options.prompt_length} + {options.max_new_tokens} exceeds "
            f"the model's {model.max_positions} positions. Lower one of them."
        )
    if options.rows % data:
        raise ConfigError(
            f"data.rows = {options.rows} is not a multiple of the {data} devices that share the rows. Set it to a "
            f"multiple of {data}."
        )
