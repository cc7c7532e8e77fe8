"""Qwen2 and Qwen2.5 (transformers' `Qwen2Model`): biases on q, k and v, none elsewhere."""

from pipeline.errors import CheckpointError
from pipeline.models.architecture import Architecture, KeyTable
from pipeline.models.hf_config import HfConfig
from pipeline.models.llama import KEY_TABLE as LLAMA_TABLE
from pipeline.models.llama import read_decoder

KEY_TABLE: KeyTable = LLAMA_TABLE | {
    "layers.*.self_attn.q_proj.bias": ("attention.q_bias", "NH"),
    "layers.*.self_attn.k_proj.bias": ("attention.k_bias", "KH"),
    "layers.*.self_attn.v_proj.bias": ("attention.v_bias", "KH"),
}


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    """The architecture and its tensors. Raises CheckpointError for what is not implemented."""
    arch = read_decoder(config, default_max_positions=32768)
    _refuse_sliding_window(config, arch)
    return arch, KEY_TABLE


def _refuse_sliding_window(config: HfConfig, arch: Architecture) -> None:
    """Published configs name a window even where no layer uses it; only one that applies is refused."""
    used = config.flag("use_sliding_window", False)
    window = config.positive_int("sliding_window", 4096)
    first = config.count("max_window_layers", 28)
    kinds = config.strings("layer_types") or [
        "full_attention" if layer < first else "sliding_attention" for layer in range(arch.num_layers)
    ]
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != arch.num_layers:
        raise CheckpointError(
            f"{config.where}: layer_types is {kinds}, expected full_attention or sliding_attention for each of the "
            f"{arch.num_layers} layers. Use another model."
        )
    if used and window < arch.max_positions and "sliding_attention" in kinds:
        raise CheckpointError(
            f"{config.where}: {kinds.count('sliding_attention')} layers attend within a sliding window of {window} "
            f"positions, which is not implemented. Use a model with full attention."
        )
