"""The capture: its activations, and the spec of the step that computes them."""

import math
from collections.abc import Collection, Sequence

from pipeline.config.choices import Keep, Positions, When
from pipeline.config.schema import BatchConfig, CaptureConfig, RunConfig
from pipeline.core.errors import ConfigError
from pipeline.core.messages import shown
from pipeline.core.sites import ActivationKey, Site, activation_keys
from pipeline.data.selection import slots_per_row
from pipeline.models.registry import Model
from pipeline.models.weight_specs import has_site
from pipeline.step.spec import EncoderSpec, StepSpec
from pipeline.store.format.layout import LARGEST, OUTPUTS, SELECTED, TOKENS, ArraySpec, activation_spec, output_specs


def plan_step(config: RunConfig, model: Model, encoders: tuple[EncoderSpec, ...]) -> StepSpec:
    """The spec of a run's step. Raises ConfigError for a site or layer that the model does not have, for a row length
    that it does not support, and for settings that contradict each other."""
    capture, batch = config.capture, config.batch
    encoded = {encoder.key for encoder in encoders} if capture.keep is Keep.features else set()
    keys = tuple(key for key in captured_keys(capture, model) if key not in encoded)
    if capture.when is When.decode:
        _require_kept(capture)
    if Site.attn_pattern in capture.sites and capture.positions is Positions.all:
        raise ConfigError(
            "capture.sites contains attn_pattern with capture.positions=all: each token would have a value per head "
            "and position of its row. Set capture.positions to last, every, token, regex or sample, to select the "
            "tokens that attend."
        )
    selected = slots_per_row(capture, batch)
    if not 1 <= batch.length <= model.max_positions:
        raise ConfigError(
            f"batch.length is {batch.length}, but the model has {model.max_positions} positions. "
            f"Set batch.length to 1..{model.max_positions}."
        )
    _require_overlap(batch, capture)
    slots = (TOKENS if selected is None else SELECTED).slots
    activations = {
        key: activation_spec(key, model.hook_name(key), model.width(key, batch.length), str(capture.dtype), slots)
        for key in keys
    }
    if Site.router_indices in capture.sites and capture.dtype in LARGEST:
        raise ConfigError(
            f"capture.sites contains {Site.router_indices}, whose values are integers, with "
            f"capture.dtype={capture.dtype}, which stores scaled values. Set capture.dtype=bfloat16, or remove "
            f"{Site.router_indices}."
        )
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
    )


def _require_overlap(batch: BatchConfig, capture: CaptureConfig) -> None:
    """Raises ConfigError for windows that cannot overlap by `batch.overlap`."""
    if not 0 <= batch.overlap < batch.length:
        raise ConfigError(
            f"batch.overlap is {batch.overlap}. Set it to 0..{batch.length - 1} (less than batch.length), so that each "
            "window has tokens of its own."
        )
    if batch.overlap and batch.adding:
        raise ConfigError(
            f"batch.overlap={batch.overlap} with {batch.adding}, whose windows begin with tokens that they add. Set "
            "batch.overlap=0, or batch.packing=pack and batch.windows=continued."
        )
    if batch.overlap and capture.when is When.decode:
        raise ConfigError(
            f"batch.overlap={batch.overlap} with capture.when=decode, which keeps activations that were computed with "
            "all tokens before them as context. Set batch.overlap=0, or capture.when=document."
        )


def _outputs(capture: CaptureConfig, model: Model, slots: str) -> tuple[ArraySpec, ...]:
    """The arrays of `capture.outputs`. Raises ConfigError for unknown outputs, and for a model without a head."""
    if not capture.outputs:
        return ()
    if unknown := [name for name in capture.outputs if name not in OUTPUTS]:
        raise ConfigError(
            f"capture.outputs contains {shown(unknown)}. Set it to a subset of [{','.join(OUTPUTS)}], or to []."
        )
    if model.head is None:
        raise ConfigError(
            f"capture.outputs is {shown(capture.outputs)}, but the model is an encoder ({model.family}), which does "
            "not predict next tokens. Set capture.outputs=[], or use a causal model."
        )
    if "top_logprobs" in capture.outputs and capture.top_logprobs > model.arch.vocab_size:
        raise ConfigError(
            f"capture.top_logprobs is {capture.top_logprobs}, but the model's vocabulary has {model.arch.vocab_size} "
            f"tokens. Set it to at most {model.arch.vocab_size}."
        )
    return output_specs(capture.outputs, capture.top_logprobs, slots)


def captured_keys(capture: CaptureConfig, model: Model) -> tuple[ActivationKey, ...]:
    """The activations that `capture` names. Raises ConfigError for a layer or site that the model does not have."""
    names = [str(site) for site in model.sites]
    unknown = [site for site in capture.sites if site not in names]
    if unknown or not capture.sites:
        raise ConfigError(
            f"capture.sites contains {shown(unknown) if unknown else 'nothing'}, but the model has {', '.join(names)}. "
            f"Set capture.sites to a subset, e.g. [resid_post]."
        )
    layers, sites = captured_layers(capture.layers, model.num_layers), tuple(map(Site, dict.fromkeys(capture.sites)))
    for site in sites:
        have = [layer for layer in range(model.num_layers) if has_site(model.arch, layer, site)]
        missing = [layer for layer in layers if layer not in have]
        if missing and capture.layers != "all":
            raise ConfigError(
                f"capture.layers is {shown(list(layers))} with the site {site}, which layer {missing[0]} lacks. "
                f"Layers that have it: {', '.join(map(str, have))}. Set capture.layers to some of these, or to "
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
    return tuple(sorted({layer % num_layers for layer in layers}))


def _require_kept(capture: CaptureConfig) -> None:
    """Raises ConfigError for what is not kept while decoding."""
    sites = [site for site in (Site.attn_entropy, Site.attn_pattern, Site.router_indices) if site in capture.sites]
    wanted = {f"capture.sites contains {sites[0]}" if sites else "": sites}
    wanted |= {f"capture.outputs is {shown(capture.outputs)}": capture.outputs, "capture.encode is set": capture.encode}
    if what := next((what for what, values in wanted.items() if values), None):
        raise ConfigError(
            f"{what} with capture.when=decode, which keeps only activations in model.dtype. Set capture.when=document, "
            f"or remove it."
        )


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
