"""Rotary embeddings and windows, from the older and the newer form of config.json."""

from pipeline.core.errors import CheckpointError
from pipeline.core.json_text import shown
from pipeline.models.architecture import Architecture, LocalAttention, Rope, RopeKind
from pipeline.models.families.hf_config import HfConfig

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def read_rope(config: HfConfig, max_positions: int, default_theta: float = 10000.0) -> Rope:
    """The rotary embedding, with the meaning that transformers 5 gives to both forms.

    Older files have `rope_theta` and `rope_scaling`, newer ones `rope_parameters` with all of it.
    """
    values = rope_values(config)
    rope = parse_rope(values, config.positive_float("rope_theta", default_theta), max_positions)
    values.finish()
    return rope


def rope_values(config: HfConfig) -> HfConfig:
    """The mapping that describes the rotary embedding; empty for the default."""
    scaling, parameters = config.nested("rope_scaling"), config.nested("rope_parameters")
    if scaling.values and parameters.values and scaling.values != parameters.values:
        raise CheckpointError(
            f"{config.where} has a rope_scaling and a rope_parameters that differ: expected one of them. "
            f"Remove the other."
        )
    return scaling if scaling.values else parameters


def parse_rope(values: HfConfig, default_theta: float, max_positions: int) -> Rope:
    """A rotary embedding from the mapping of `rope_values`; the caller calls `values.finish`."""
    kind = RopeKind(values.choice("rope_type" if "rope_type" in values else "type", tuple(RopeKind), "default"))
    if "type" in values:
        values.choice("type", (str(kind),))
    theta = values.positive_float("rope_theta", default_theta)
    if kind is RopeKind.linear:
        return Rope(theta, kind, values.positive_float("factor"))
    if kind is RopeKind.llama3:
        low, high = values.positive_float("low_freq_factor"), values.positive_float("high_freq_factor")
        if low >= high:
            raise CheckpointError(
                f"{values.where}: low_freq_factor is {low:g} and high_freq_factor {high:g}, expected the former to be "
                f"less. Is the file damaged?"
            )
        return Rope(
            theta,
            kind,
            values.positive_float("factor"),
            low,
            high,
            values.positive_int("original_max_position_embeddings", max_positions),
        )
    return Rope(theta)


def all_local(arch: Architecture, window: int | None) -> LocalAttention | None:
    """The window of all layers; None where it is as long as the longest row."""
    if window is None or window >= arch.max_positions:
        return None
    return LocalAttention("L" * arch.num_layers, window, arch.rope)


def read_local(
    config: HfConfig, default_pattern: str, window: int | None, rope: Rope, local_rope: Rope, max_positions: int
) -> LocalAttention | None:
    """The local layers, by `layer_types` or else by the family's default; None where all layers are alike.

    `window` is the family's reading of `sliding_window`. Published configs have one even where no layer uses it.
    """
    kinds = config.strings("layer_types") or [_LOCAL if letter == "L" else _GLOBAL for letter in default_pattern]
    if set(kinds) - {_LOCAL, _GLOBAL} or len(kinds) != len(default_pattern):
        raise CheckpointError(
            f"{config.where}: layer_types is {shown(kinds)}, expected {_GLOBAL} or {_LOCAL} for each of the "
            f"{len(default_pattern)} layers. Use another model."
        )
    window = max_positions if window is None else min(window, max_positions)
    if _LOCAL not in kinds or (window == max_positions and local_rope == rope):
        return None
    return LocalAttention("".join("L" if kind == _LOCAL else "G" for kind in kinds), window, local_rope)
