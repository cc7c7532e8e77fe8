"""Reads rotary embeddings and sliding windows from the older and the newer form of config.json."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pipeline.core.messages import shown
from pipeline.models.architecture import Architecture, LocalAttention, Rope, RopeKind, Router
from pipeline.models.families.hf_config import HfConfig

LOCAL, GLOBAL = "sliding_attention", "full_attention"
_MAX_EXPERTS = 1 << 20  # in all layers together, since each has its own tensors
USUAL_KINDS = tuple(kind for kind in RopeKind if kind is not RopeKind.proportional)  # only Gemma 4 has proportional


def read_rope(
    config: HfConfig,
    max_positions: int,
    default_theta: float = 10000.0,
    values: HfConfig | None = None,
    theta_key: str = "rope_theta",
) -> Rope:
    """The rotary embedding, interpreted as in transformers 5; `values` is what `rope_values` returned.

    Older files have `rope_theta` and `rope_scaling`; newer files have everything in `rope_parameters`.
    """
    values = rope_values(config) if values is None else values
    rope = parse_rope(values, config.positive_float(theta_key, default_theta), max_positions)
    values.finish()
    return rope


def read_fraction(config: HfConfig, values: HfConfig, default: float, key: str = "partial_rotary_factor") -> float:
    """The share of a head's dimensions that rotate, which older files have outside of `rope_values`."""
    return values.positive_float("partial_rotary_factor", config.positive_float(key, default))


def nested_ropes(
    config: HfConfig,
    max_positions: int,
    default_theta: float,
    default_local_theta: float,
    kinds: Sequence[RopeKind] = USUAL_KINDS,
) -> tuple[Rope, Rope]:
    """The rotary embeddings of global and of local layers, if `rope_parameters` has a mapping for each."""
    parameters = config.nested("rope_parameters")
    global_values, local_values = parameters.nested(GLOBAL), parameters.nested(LOCAL)
    rope = parse_rope(global_values, default_theta, max_positions, kinds)
    local_rope = parse_rope(local_values, default_local_theta, max_positions, kinds)
    for values in (global_values, local_values, parameters):
        values.finish()
    return rope, local_rope


def rope_values(config: HfConfig, default: Mapping[str, object] = MappingProxyType({})) -> HfConfig:
    """The mapping that describes the rotary embedding; `default` if the file has none."""
    scaling, parameters = config.nested("rope_scaling"), config.nested("rope_parameters")
    is_clear = not scaling.values or not parameters.values or scaling.values == parameters.values
    config.expect(is_clear, "rope_scaling or rope_parameters, got both, with different values", "Remove one of them.")
    if default and not scaling.values and "rope_parameters" not in config:
        return HfConfig(default, config.where)
    return scaling if scaling.values else parameters


def parse_rope(
    values: HfConfig, default_theta: float, max_positions: int, kinds: Sequence[RopeKind] = USUAL_KINDS
) -> Rope:
    """Reads a rotary embedding from the mapping that `rope_values` returns."""
    kind = RopeKind(values.choice("rope_type" if "rope_type" in values else "type", kinds, "default"))
    if "type" in values:
        values.choice("type", (str(kind),))
    theta = values.positive_float("rope_theta", default_theta)
    if kind is RopeKind.linear:
        return Rope(theta, kind, values.positive_float("factor"))
    if kind is RopeKind.proportional:
        rotating = values.positive_float("partial_rotary_factor", 1.0)
        return Rope(theta, kind, values.positive_float("factor", 1.0), rotating=rotating)
    if kind is RopeKind.llama3:
        low, high = values.positive_float("low_freq_factor"), values.positive_float("high_freq_factor")
        values.expect(low <= high, f"low_freq_factor of at most high_freq_factor, {high:g}, got {low:g}")
        return Rope(
            theta,
            kind,
            values.positive_float("factor"),
            values.positive_int("original_max_position_embeddings", max_positions),
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if kind in (RopeKind.yarn, RopeKind.longrope):
        return (_parse_yarn if kind is RopeKind.yarn else _parse_long)(values, theta, max_positions)
    if kind is RopeKind.dynamic:
        values.positive_float("factor")  # applies only to rows longer than max_positions, which are refused
    return Rope(theta)


def _parse_yarn(values: HfConfig, theta: float, max_positions: int) -> Rope:
    """YaRN. If the file has no `attention_factor`, it is derived as in transformers."""
    values.expect(theta > 1, f"a rope_theta above 1, got {theta:g}")
    original = values.positive_int("original_max_position_embeddings", max_positions)
    factor = values.optional_float("factor") or max_positions / original
    attention_factor = values.optional_float("attention_factor", None)
    mscale, mscale_all_dim = values.float_from_0("mscale", 0.0), values.float_from_0("mscale_all_dim", 0.0)
    growth = yarn_growth(factor)
    if attention_factor is None and mscale and mscale_all_dim:
        attention_factor = (mscale * growth + 1) / (mscale_all_dim * growth + 1)
    return Rope(
        theta,
        RopeKind.yarn,
        factor,
        original_max_positions=original,
        attention_factor=attention_factor or growth + 1,
        beta_fast=values.positive_float("beta_fast", 32.0),
        beta_slow=values.positive_float("beta_slow", 1.0),
        truncate=values.flag("truncate", True, null=False),
    )


def yarn_growth(factor: float) -> float:
    """YaRN scales queries and keys by 1 + this in a context that is `factor` times as long."""
    return 0.1 * math.log(max(factor, 1.0))


def _parse_long(values: HfConfig, theta: float, max_positions: int) -> Rope:
    """LongRoPE. If the file has no `attention_factor`, it is derived as in transformers."""
    original = values.positive_int("original_max_position_embeddings", max_positions)
    factor = values.optional_float("factor", None) or max_positions / original
    growth = math.log(max(factor, 1.0))
    attention_factor = values.optional_float("attention_factor", None)
    return Rope(
        theta,
        RopeKind.longrope,
        factor,
        original_max_positions=original,
        attention_factor=attention_factor or (math.sqrt(1 + growth / math.log(original)) if growth else 1.0),
        short_factors=values.positive_floats("short_factor"),
        long_factors=values.positive_floats("long_factor"),
    )


def check_sizes(config: HfConfig, arch: Architecture) -> None:
    """Raises CheckpointError if sizes do not fit each other."""
    for sizes in arch.all_sizes:
        heads, kv_heads = sizes.num_heads, sizes.num_kv_heads
        rotary = sizes.head_dim if arch.rotary_dim is None else arch.rotary_dim
        config.expect(heads % kv_heads == 0, f"a multiple of the {kv_heads} key-value heads as heads, got {heads}")
        if arch.rope is not None:
            is_even = 0 < rotary <= sizes.head_dim and rotary % 2 == 0
            config.expect(is_even, f"an even number of a head's {sizes.head_dim} dimensions to rotate, got {rotary}")
            for rope in arch.long_ropes:
                lengths = {len(rope.short_factors), len(rope.long_factors)}
                config.expect(lengths == {rotary // 2}, f"{rotary // 2} numbers as short_factor and long_factor")
    if arch.local is not None and arch.local.rope not in (None, arch.rope):
        truncates = all(rope.truncate for rope in (arch.rope, arch.local.rope))
        what = "no truncate=false: transformers ignores it where local layers have a rotary embedding of their own"
        config.expect(truncates, what, "Remove the attribute.")
    if (experts := arch.experts) is not None:
        number, size = experts.num_experts, experts.num_experts // experts.num_groups
        smallest = 2 if experts.router is Router.sigmoid_groups else 1
        are_groups = number % experts.num_groups == 0 and smallest <= size and number * arch.num_layers <= _MAX_EXPERTS
        config.expect(
            are_groups and experts.groups_per_token <= experts.num_groups,
            f"at most {_MAX_EXPERTS:,} experts in all layers, in groups of the same size, of which a token uses some, "
            f"got {number:,} in {experts.num_groups} groups, of which it uses {experts.groups_per_token}",
        )
        most = size * experts.groups_per_token
        config.expect(experts.per_token <= most, f"at most {most} experts of a token, got {experts.per_token}")


def all_local(arch: Architecture, window: int | None) -> LocalAttention | None:
    """The same window for all layers; None if it covers the longest row."""
    if window is None or window >= arch.max_positions:
        return None
    return LocalAttention("L" * arch.num_layers, window, arch.rope)


def read_local(
    config: HfConfig, arch: Architecture, default_pattern: str, window: int | None, local_rope: Rope | None = None
) -> LocalAttention | None:
    """The local layers, from `layer_types` or, without it, the family's default; None if all layers are global.

    `window` is the value of `sliding_window`, as the family interprets it. Published files have one even if no layer
    uses it. Without `local_rope`, local layers have the global layers' rotary embedding.
    """
    pattern = read_pattern(config, default_pattern, {"L": LOCAL, "G": GLOBAL})
    local_rope = local_rope or arch.rope
    window = arch.max_positions if window is None else min(window, arch.max_positions)
    if "L" not in pattern or (window == arch.max_positions and local_rope == arch.rope):
        return None
    return LocalAttention(pattern, window, local_rope)


def with_rotating_windows(
    config: HfConfig, arch: Architecture, default_pattern: str, window: int | None
) -> Architecture:
    """Adds local layers, as in `read_local`; only these rotate."""
    pattern = read_pattern(config, default_pattern, {"L": LOCAL, "G": GLOBAL})
    config.expect(
        window is not None or "L" not in pattern, f"a length as sliding_window of layers with {LOCAL}, got null"
    )
    rotation = pattern.replace("L", "R").replace("G", "N")
    return dataclasses.replace(arch, local=read_local(config, arch, pattern, window), rotation=rotation)


def every_nth_global(num_layers: int, period: int) -> str:
    """A letter per layer: L local, G global."""
    return "".join("L" if (layer + 1) % period else "G" for layer in range(num_layers))


def read_pattern(config: HfConfig, default: str, kinds: Mapping[str, str], key: str = "layer_types") -> str:
    """A letter per layer, from `layer_types` or, without it, the family's default. `kinds` has each letter's name."""
    letters = {kind: letter for letter, kind in kinds.items()}
    names = config.strings(key) or [kinds[letter] for letter in default]
    config.expect(
        {*names} <= letters.keys() and len(names) == len(default),
        f"{' or '.join(sorted(letters))} as {key}, for each of the {len(default)} layers, got {shown(names)}",
        "Use another model.",
    )
    return "".join(letters[name] for name in names)
