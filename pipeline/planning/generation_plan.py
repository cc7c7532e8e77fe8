"""What generation adds to a plan: its shapes, and the memory that it needs on each device."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.cluster.devices import Topology
from pipeline.config.choices import Weights, When
from pipeline.config.schema import GenerateData, RunConfig
from pipeline.core.errors import ConfigError
from pipeline.core.sites import ActivationKey, Site
from pipeline.models.architecture import Architecture, Part
from pipeline.models.registry import Model
from pipeline.models.weight_specs import has_site
from pipeline.planning.expert_groups import pair_bytes
from pipeline.planning.mesh import MAX_WEIGHTS_SHARE, WeightsPlan, largest_tensor, plan_weights
from pipeline.store.format.layout import ITEM_BYTES, MIB

_MAX_GROUP_BYTES = 1 << 30
_SLOT_TILE = 32  # slots that TPUs keep together, in int8: if it does not divide a cache, each step copies the cache
_PREFILL_SHARE = 8  # a prefill has room for an eighth of the rows


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled. `top_k` applies before `top_p`, as in transformers."""

    temperature: float = 0.0  # 0: greedy, the likeliest token
    top_k: int | None = None  # only the k likeliest tokens
    top_p: float | None = None  # only the smallest set of likeliest tokens with at least this total probability
    seed: int = 0

    @property
    def has_top_p(self) -> bool:
        return self.top_p is not None and self.top_p < 1

    @property
    def ranks_tokens(self) -> bool:
        """Whether sampling sorts the likeliest tokens."""
        return self.temperature > 0 and (self.top_k is not None or self.has_top_p)


@dataclass(frozen=True)
class GenerationSpec:
    """The shapes of generation, over all devices, and how tokens are sampled, for `compile_programs`."""

    rows: int  # completions generated at the same time; a multiple of the devices along `data`
    max_prompt: int  # tokens
    max_new_tokens: int
    end_tokens: tuple[int, ...]
    sampling: Sampling
    keys: tuple[ActivationKey, ...] = ()  # activations captured during decoding
    dtype: str = "float32"  # of the captured activations
    cache_is_int8: bool = False  # int8 keys and values; else they have the weights' dtype
    samples: int = 1  # completions of each prompt, in as many rows of a device
    is_beam_search: bool = False  # whether these are the best ones, rather than samples
    attention: str = "auto"  # the requested implementation, for the prefill
    speculate: int = 0  # proposed tokens per step
    block: int = 512  # attention reads a cache in blocks of at least as many slots
    segment_steps: int = 16  # decoding steps between the host's checks; an ended row idles for half of them on average

    @property
    def length(self) -> int:
        """The slots of a row, for prompt and completion."""
        return self.max_prompt + self.max_new_tokens

    def slots(self, arch: Architecture, layer: int) -> int:
        """The slots of a layer's cache. The first of a step's positions attends to a whole window when those of its
        proposals have been written."""
        if not arch.is_local(layer):
            return self.length
        return min(self.length, -(-(arch.local.window + self.speculate) // _SLOT_TILE) * _SLOT_TILE)

    def prefill_rows(self, data: int) -> int:
        """The number of prompts in a prefill, with `data` devices along the mesh's data axis."""
        return data * max(1, self.rows // data // self.samples // _PREFILL_SHARE)


@dataclass(frozen=True)
class GenerationPlan:
    """The plan of generation. Bytes are per device."""

    spec: GenerationSpec  # without end tokens
    weights: WeightsPlan  # all layers and the head; may have more devices along `tensor` than extraction
    cache_bytes: int  # keys and values, or latents, of all rows; twice for beams, since a step copies them in new order
    logits_bytes: int  # of one step, in float32; sampling needs a few times as much
    kept_bytes: int  # activations of all rows, with capture.when=decode
    notes: tuple[str, ...]  # including those of `weights`

    def describe(self) -> str:
        """One line, for people."""
        return (
            f"generate  {self.spec.rows} rows of {self.spec.max_prompt} + {self.spec.max_new_tokens} tokens; tensor "
            f"{self.weights.tensor}; on each device {self.weights.device_bytes / MIB:.0f} MiB of weights "
            f"({self.weights.sharding}), {self.cache_bytes / MIB:.1f} MiB of keys and values, "
            f"{self.logits_bytes / MIB:.1f} MiB of logits"
            + (f", {self.kept_bytes / MIB:.1f} MiB of activations" if self.kept_bytes else "")
        )


def plan_generation(
    config: RunConfig, model: Model, activations: Mapping[ActivationKey, int], tensor: int, topology: Topology
) -> GenerationPlan | None:
    """The plan of `data=generate`; None for other data.

    `activations`: the widths of those captured; `tensor`: the size of the tensor axis in extraction, and the minimum
    for generation. Raises ConfigError for a configuration that cannot work or does not fit in a device.
    """
    options, keeps_activations = config.data, config.capture.when is When.decode
    if not isinstance(options, GenerateData):
        return None
    if config.batch.adding:  # a row holds the tokens of completions as they were generated, and nothing else
        raise ConfigError(
            f"{config.batch.adding} with data=generate, whose documents are stored as they were generated. Set "
            "batch.packing=pack and batch.windows=continued."
        )
    if options.beams > 1:
        _require_beams(options, keeps_activations)
    spec = GenerationSpec(
        rows=options.rows,
        max_prompt=options.prompt_length,
        max_new_tokens=options.max_new_tokens,
        end_tokens=(),
        sampling=Sampling(options.temperature, options.top_k, options.top_p, options.seed),
        keys=tuple(activations) if keeps_activations else (),
        dtype=str(config.model.dtype),
        cache_is_int8=options.has_int8_cache,
        samples=options.completions,
        is_beam_search=options.beams > 1,
        speculate=options.speculate,
        attention=str(config.model.attention),
    )
    weights = _divide_weights(config, model, tensor, topology)
    data, itemsize = topology.devices // weights.tensor, ITEM_BYTES[config.model.dtype]
    token_bytes = sum(activations.values()) * itemsize
    _require_valid(spec, model, data)
    if keeps_activations:
        _require_bounded_groups(options.group_size, spec.length * token_bytes)
    cache = cache_bytes(model.arch, spec, itemsize, weights.tensor) // data * (2 if spec.is_beam_search else 1)
    kept = spec.rows * spec.length * token_bytes // data if keeps_activations else 0
    logits = spec.rows // data * (1 + spec.speculate) * model.arch.vocab_size * 4
    if topology.device_bytes is not None and weights.device_bytes + cache + logits + kept > topology.device_bytes:
        raise ConfigError(
            f"generation needs {weights.device_bytes / MIB:.0f} MiB for weights, {cache / MIB:.0f} MiB for keys and "
            f"values, and {(logits + kept) / MIB:.0f} MiB for logits{' and kept activations' if kept else ''} on each "
            f"device, which has {topology.device_bytes / MIB:.0f} MiB. Lower data.rows."
        )
    notes = weights.notes
    if config.batch.length < spec.length and not keeps_activations:
        overlap = config.batch.overlap
        attended = f"attend to only {overlap} tokens before their own" if overlap else "do not attend to each other"
        notes += (
            f"a prompt with its completion has up to {spec.length} tokens: if longer than "
            f"batch.length={config.batch.length}, it is split into windows that {attended}",
        )
    return GenerationPlan(spec, weights, cache, logits, kept, notes)


def _divide_weights(config: RunConfig, model: Model, tensor: int, topology: Topology) -> WeightsPlan:
    """The division of the weights over a mesh with at least `tensor` devices along that axis.

    A larger `tensor` is preferred to fsdp: a decoding step reads every weight for few tokens, so fsdp would gather the
    whole model in each step.
    """
    sizes = model.generation.weight_bytes(str(config.model.dtype), config.model.quantised)
    memory = topology.device_bytes
    most = largest_tensor(topology, model.tensor_dims)
    is_auto = config.model.weights is Weights.auto and memory is not None
    if is_auto and tensor < most and sizes.on_device(tensor) > MAX_WEIGHTS_SHARE * memory:
        tensor = most
    data, rows = topology.devices // tensor, config.data.rows
    num_pair_bytes = pair_bytes(model.arch, -(-rows // data), ITEM_BYTES[config.model.dtype])  # of a decoding step
    return plan_weights(config.model.weights, sizes, data, tensor, topology, num_pair_bytes)


def cache_bytes(arch: Architecture, spec: GenerationSpec, itemsize: int, tensor: int = 1) -> int:
    """Bytes of all rows' and layers' caches on one of the devices along `tensor`: keys and values (int8 with float32
    scales), or latents, which are not divided; for a DeltaNet the last inputs of its convolutions and its float32
    states; only the inputs for a short convolution."""
    row_bytes = latent_bytes = 0
    for layer in range(arch.num_layers):
        if has_site(arch, layer, Site.k):
            sizes = arch.with_sizes_of(layer)
            width = sizes.head_dim + sizes.value_dim if arch.latent is None else arch.latent.kv_rank + arch.rotary_dim
            slot_bytes = spec.slots(arch, layer) * (width + 2 * 4 if spec.cache_is_int8 else width * itemsize)
            if arch.latent is None:
                row_bytes += sizes.num_kv_heads * slot_bytes
            else:
                latent_bytes += slot_bytes
        if Part.conv in arch.kind(layer).parts:
            row_bytes += (arch.conv.num_taps - 1) * arch.d_model * itemsize
        if Part.delta in arch.kind(layer).parts:
            keys, values = arch.delta.key_dim, arch.delta.values_per_key * arch.delta.value_dim
            conv_bytes = (arch.delta.num_taps - 1) * (2 * keys + values) * itemsize
            row_bytes += arch.delta.num_heads * (conv_bytes + keys * values * 4)
    return spec.rows * (row_bytes // tensor + latent_bytes)


def _require_valid(spec: GenerationSpec, model: Model, data: int) -> None:
    if spec.length > model.arch.max_generated:
        raise ConfigError(
            f"data.prompt_length + data.max_new_tokens = {spec.max_prompt} + {spec.max_new_tokens} exceeds the model's "
            f"{model.arch.max_generated} positions. Lower one of them."
        )
    is_recurrent = model.arch.delta is not None or model.arch.conv is not None
    if spec.speculate and is_recurrent:
        raise ConfigError(
            f"data.speculate = {spec.speculate}, but the model has recurrent layers, whose states cannot drop "
            "rejected proposals. Set data.speculate=0."
        )
    if spec.rows % data:
        raise ConfigError(
            f"data.rows = {spec.rows} is not a multiple of the {data} devices that share the rows. Set it to a "
            f"multiple of {data}."
        )
    rows = spec.rows // data
    if rows < spec.samples or (spec.is_beam_search and rows % spec.samples):
        least, name = ("a multiple of", "data.beams") if spec.is_beam_search else ("at least", "data.samples")
        raise ConfigError(
            f"data.rows = {spec.rows} is {rows} on each device, expected {least} {name} = {spec.samples}: all "
            f"completions of a prompt start on one device. Set data.rows to {least} {spec.samples * data}."
        )


def _require_beams(options: GenerateData, keeps_activations: bool) -> None:
    """Raises ConfigError for what beam search does not have."""
    settings = {
        "data.stop": options.stop,
        "data.speculate": options.speculate,
        "capture.when=decode": keeps_activations,
    }
    if excluded := [name for name, value in settings.items() if value]:
        raise ConfigError(
            f"data.beams = {options.beams} with {excluded[0]}: beam search has end tokens only, no proposals, and the "
            f"activations of finished documents. Remove {excluded[0]}."
        )


def _require_bounded_groups(group: int, document_bytes: int) -> None:
    """Raises ConfigError if a group, which is one object and several times in memory, may be too large."""
    if group * document_bytes > _MAX_GROUP_BYTES:
        most = _MAX_GROUP_BYTES // document_bytes
        remedy = f"Lower data.group to at most {most}" if most else "Capture fewer layers or sites"
        raise ConfigError(
            f"capture.when=decode: data.group = {group} documents have up to {group * document_bytes / MIB:.0f} MiB of "
            f"activations, expected at most {_MAX_GROUP_BYTES / MIB:.0f}. {remedy}."
        )
