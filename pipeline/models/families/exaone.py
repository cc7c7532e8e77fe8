"""EXAONE 4 (transformers' `Exaone4Model`): OLMo 2's norms after the blocks, norms of each head's queries and keys, and
windows. Unless `sliding_window` is null, only layers with a window rotate."""

from pipeline.models.architecture import Architecture, KeyTable
from pipeline.models.families import olmo
from pipeline.models.families.hf_attention import every_nth_global, with_rotating_windows
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.llama import Defaults, read_decoder
from pipeline.models.families.qwen import HEAD_NORMS


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    arch = read_decoder(config, Defaults(2048, kv_heads=32, eps=1e-5))
    window = config.optional_int("sliding_window", 4096)
    period = 1 if window is None or "layer_types" in config else config.positive_int("sliding_window_pattern", 4)
    config.ignore("sliding_window_pattern")
    with_windows = with_rotating_windows(config, arch, every_nth_global(arch.num_layers, period), window)
    return arch if window is None else with_windows, olmo.KEY_TABLE | HEAD_NORMS
