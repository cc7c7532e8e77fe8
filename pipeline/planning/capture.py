"""The capture: its activations, the spec of the step that computes them, and the checks of its output."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pipeline.config.choices import Keep, OnNotFinite, Packing, Positions, When
from pipeline.config.limits import shown
from pipeline.config.schema import CaptureConfig, RunConfig
from pipeline.core.errors import ConfigError
from pipeline.core.sites import ActivationKey, Site, activation_keys
from pipeline.data.selection import slots_per_row
from pipeline.models.weight_specs import has_site, why_missing
from pipeline.planning.model_facts import ModelFacts
from pipeline.step.spec import CompilerOption, EncoderSpec, StepSpec
from pipeline.store.format.layout import OUTPUTS, SELECTED, TOKENS, ArraySpec, activation_spec, output_specs
from pipeline.store.format.scaled import LARGEST

_POSITIONS_WITH_PER_ROW = (Positions.last, Positions.token, Positions.regex)  # these use capture.per_row


@dataclass(frozen=True)
class CheckPlan:
    """What a run checks in its blocks."""

    fail_on_not_finite: bool  # otherwise, warns
    warn_of_unselected: bool  # if a row has too few slots for its selected tokens
    warn_of_empty_rows: bool  # if rows' slots are full long before their positions


def plan_checks(config: RunConfig) -> CheckPlan:
    """The checks that `capture` and `batch` configure."""
    has_per_row = config.capture.positions in _POSITIONS_WITH_PER_ROW
    return CheckPlan(
        fail_on_not_finite=config.capture.on_not_finite is OnNotFinite.fail,
        warn_of_unselected=has_per_row,
        warn_of_empty_rows=has_per_row and config.batch.packing is Packing.pack,
    )


def plan_step(config: RunConfig, model: ModelFacts, encoders: tuple[EncoderSpec, ...]) -> StepSpec:
    """The spec of a run's step. Raises ConfigError for a site or layer that the model does not have, for a row length
    that it does not support, and for settings that contradict each other."""
    capture, batch = config.capture, config.batch
    encoded = {encoder.key for encoder in encoders} if capture.keep is Keep.features else set()
    keys = tuple(key for key in captured_keys(capture, model) if key not in encoded)
    if capture.when is When.decode and (scores := {Site.attn_entropy, Site.attn_pattern}.intersection(capture.sites)):
        raise ConfigError(
            f"capture.sites contains {min(scores)}, which capture.when=decode cannot compute. Set "
            f"capture.when=document, or remove {min(scores)}."
        )
    if Site.attn_pattern in capture.sites and capture.positions is Positions.all:
        raise ConfigError(
            "capture.sites contains attn_pattern with capture.positions=all: each token would have a value per head "
            "and position of its row. Set capture.positions to last, every, token, regex or sample, to select the "
            "tokens that attend."
        )
    selected = slots_per_row(capture, batch.length)
    if not 1 <= batch.length <= model.max_positions:
        raise ConfigError(
            f"batch.length is {batch.length}, but the model has {model.max_positions} positions. "
            f"Set batch.length to 1..{model.max_positions}."
        )
    slots = (TOKENS if selected is None else SELECTED).slots
    activations = {
        key: activation_spec(key, model.hook_name(key), model.width(key, batch.length), str(capture.dtype), slots)
        for key in keys
    }
    if Site.router_indices in capture.sites:
        _refuse_integers(capture)
    return StepSpec(
        activations=activations,
        rows=batch.rows,
        length=batch.length,
        dtype=str(capture.dtype),
        attention=str(config.model.attention),
        statistics=capture.statistics and bool(keys or encoders),
        selected=selected,
        scale_group=_scale_group(capture, activations.values()),
        encoders=encoders,
        head_outputs=_outputs(capture, model, slots),
        compiler_options=_compiler_options(config.run.compiler_options),
    )


def _compiler_options(options: object) -> tuple[tuple[str, CompilerOption], ...]:
    """The options as pairs. Raises ConfigError unless they are values by name. XLA checks them when the step is
    compiled."""
    is_mapping = isinstance(options, Mapping) and all(isinstance(name, str) for name in options)
    if options is not None and not (is_mapping and all(isinstance(x, CompilerOption) for x in options.values())):
        raise ConfigError(
            f"run.compiler_options is {shown(options)}, expected booleans, numbers or strings by option name, e.g. "
            f"{{xla_tpu_scoped_vmem_limit_kib: 32768}}."
        )
    return tuple((options or {}).items())


def _outputs(capture: CaptureConfig, model: ModelFacts, slots: str) -> tuple[ArraySpec, ...]:
    """The arrays of `capture.outputs`. Raises ConfigError for unknown outputs, and for a model without a head."""
    if not capture.outputs:
        return ()
    if unknown := [name for name in capture.outputs if name not in OUTPUTS]:
        raise ConfigError(
            f"capture.outputs contains {shown(unknown)}. Set it to a subset of [{','.join(OUTPUTS)}], or to []."
        )
    if repeated := _first_repeated(capture.outputs):
        raise ConfigError(f"capture.outputs names {repeated} twice. Name each output once.")
    if model.head is None:
        raise ConfigError(
            f"capture.outputs is {shown(capture.outputs)}, but the model is an encoder ({model.family}), which does "
            "not predict next tokens. Set capture.outputs=[], or use a causal model."
        )
    if capture.when is When.decode:
        raise ConfigError(
            f"capture.outputs is {shown(capture.outputs)} with capture.when=decode, which keeps activations but not "
            "the head's outputs. Set capture.when=document, or capture.outputs=[]."
        )
    if "top_logprobs" in capture.outputs and capture.top_logprobs > model.arch.vocab_size:
        raise ConfigError(
            f"capture.top_logprobs is {capture.top_logprobs}, but the model's vocabulary has {model.arch.vocab_size} "
            f"tokens. Set it to at most {model.arch.vocab_size}."
        )
    return output_specs(capture.outputs, capture.top_logprobs, slots)


def captured_keys(capture: CaptureConfig, model: ModelFacts) -> tuple[ActivationKey, ...]:
    """The activations that `capture` names. Raises ConfigError for a layer or site that the model does not have."""
    names = [str(site) for site in model.sites]
    unknown = [site for site in capture.sites if site not in names]
    if unknown or not capture.sites:
        raise ConfigError(
            f"capture.sites contains {shown(unknown) if unknown else 'nothing'}, but the model has {', '.join(names)}. "
            f"Set capture.sites to a subset, e.g. [resid_post]."
        )
    if repeated := _first_repeated(capture.sites):
        raise ConfigError(f"capture.sites names {repeated} twice. Name each site once.")
    layers, sites = captured_layers(capture.layers, model.num_layers), tuple(map(Site, capture.sites))
    for site in sites:
        have = [layer for layer in range(model.num_layers) if has_site(model.arch, layer, site)]
        missing = [layer for layer in layers if layer not in have]
        if missing and capture.layers != "all":
            why = why_missing(model.arch, missing[0], site)
            raise ConfigError(
                f"capture.layers is {shown(list(layers))} with the site {site}, which layer {missing[0]} lacks: "
                f"{why}. Layers that have it: {', '.join(map(str, have))}. Set capture.layers to some of these, or to "
                f"all to capture each site in every layer that has it."
            )
    keys = activation_keys(layers, sites)
    return tuple(key for key in keys if not key.site.per_layer or has_site(model.arch, key.layer, key.site))


def captured_layers(layers: object, num_layers: int) -> tuple[int, ...]:
    """`capture.layers` as sorted layer numbers: "all", a layer or a list of them, negative ones from the end. Raises
    ConfigError for anything else."""
    have = f"the model has layers 0..{num_layers - 1}"
    if layers == "all":
        return tuple(range(num_layers))
    if isinstance(layers, int):
        layers = [layers]
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
        raise ConfigError(
            f"capture.layers is {shown(layers)}; {have}. Set it to a list such as [0,{num_layers - 1}], or to all."
        )
    for layer in layers:
        if not isinstance(layer, int) or isinstance(layer, bool) or not -num_layers <= layer < num_layers:
            raise ConfigError(f"capture.layers contains {shown(layer)}, but {have}. Set capture.layers to a subset.")
    layers = [layer % num_layers for layer in layers]
    if repeated := _first_repeated(layers):
        raise ConfigError(f"capture.layers names layer {repeated} twice. Name each layer once.")
    return tuple(sorted(layers))


def _refuse_integers(capture: CaptureConfig) -> None:
    """Raises ConfigError if integers are captured with a setting that converts all activations to one dtype."""
    what = f"capture.sites contains {Site.router_indices}, whose values are integers"
    if capture.dtype in LARGEST:
        raise ConfigError(
            f"{what}, with capture.dtype={capture.dtype}, which stores scaled values. Set capture.dtype=bfloat16, or "
            f"remove {Site.router_indices}."
        )
    if capture.when is When.decode:
        raise ConfigError(
            f"{what}, with capture.when=decode, which keeps activations in model.dtype. Set capture.when=document, or "
            f"remove {Site.router_indices}."
        )


def _first_repeated(values: Sequence[object]) -> str:
    """The first value that occurs earlier in `values`, too; "" if all are different."""
    return next((str(value) for index, value in enumerate(values) if value in values[:index]), "")


def _scale_group(capture: CaptureConfig, arrays: Collection[ArraySpec]) -> int | None:
    """`capture.scale_group`. If it is set, raises ConfigError unless it divides all widths."""
    group = capture.scale_group
    if group is None:
        return None
    widths = [array.width for array in arrays]
    undivided = [f"{array.width} of {array.name}" for array in arrays if group < 1 or array.width % group]
    if undivided:
        raise ConfigError(
            f"capture.scale_group is {group}, which does not divide the width {undivided[0]}. Set it to a common "
            f"divisor of {', '.join(map(str, sorted(set(widths))))}, e.g. {math.gcd(*widths, 64)}, or to null."
        )
    return group
