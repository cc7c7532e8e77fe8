"""SmolLM3 (transformers' `SmolLM3Model`): a LLaMA in which some layers have no rotary embeddings."""

import dataclasses

from pipeline.models.architecture import Architecture, KeyTable, LocalAttention
from pipeline.models.families.hf_attention import LOCAL, read_local
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.llama import Defaults, read_decoder, read_table


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.ignore("max_window_layers")  # in published files, but transformers does not read it
    arch = read_decoder(config, Defaults(32768, kv_heads=4, theta=2e6))
    rotation = read_rotation(config, arch.num_layers)
    local = _read_local(config, arch, rotation)
    rotation = rotation if "N" in rotation else None
    return dataclasses.replace(arch, rotation=rotation, local=local), read_table(config)


def read_rotation(config: HfConfig, num_layers: int) -> str:
    """A letter per layer, as in `Architecture.rotation`. In `no_rope_layers`, 1 means that the layer rotates."""
    interval = config.positive_int("no_rope_layer_interval", 4)
    rotates = config.whole_numbers("no_rope_layers") or [(layer + 1) % interval for layer in range(num_layers)]
    config.expect(len(rotates) >= num_layers, f"{num_layers} numbers as no_rope_layers, got {len(rotates)}")
    return "".join("R" if number else "N" for number in rotates[:num_layers])


def _read_local(config: HfConfig, arch: Architecture, rotation: str) -> LocalAttention | None:
    """The local layers. Without `layer_types`, the layers without rotary embeddings have the window."""
    window = config.optional_int("sliding_window", None)
    if not config.flag("use_sliding_window", False):
        window = None
    is_local = LOCAL in config.strings("layer_types")
    config.expect(
        window is not None or not is_local, f"use_sliding_window with a sliding_window, since layers have {LOCAL}"
    )
    pattern = "".join("L" if window and letter == "N" else "G" for letter in rotation)
    return read_local(config, arch, pattern, window)
