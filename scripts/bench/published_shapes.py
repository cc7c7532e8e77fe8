"""Writes config.json files of some published models, for plans without their checkpoints (model.init=random).

python scripts/bench/published_shapes.py build/shapes
python -m pipeline.plan topology=v5e-64 model.path=build/shapes/Qwen2.5-7B model.init=random ...
"""

import json
import sys
from pathlib import Path

_QWEN2 = {"model_type": "qwen2", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
_LLAMA3 = {
    **{"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
    **{"rope_theta": 5e5, "head_dim": 128, "num_key_value_heads": 8},
}
_LONG = {"max_position_embeddings": 1048576, "rope_theta": 3580165449}  # fine-tuned for long contexts by Gradient
_GEMMA2 = {
    **{"model_type": "gemma2", "vocab_size": 256000, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6},
    **{"rope_theta": 1e4, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096},
    **{"hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
}
_QWEN3_MOE = {
    **{"model_type": "qwen3_moe", "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6},
    **{"rope_theta": 1e6, "head_dim": 128, "num_key_value_heads": 4, "norm_topk_prob": True},
    **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}
_MIXTRAL = {
    **{"model_type": "mixtral", "vocab_size": 32000, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5},
    **{"rope_theta": 1e6, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
}
_GPT_OSS = {
    **{"model_type": "gpt_oss", "vocab_size": 201088, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
    **{"rope_theta": 150000, "head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128},
    **{"num_local_experts": 32, "num_experts_per_tok": 4, "attention_bias": True, "swiglu_limit": 7.0},
    "rope_scaling": {
        **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        "original_max_position_embeddings": 4096,
    },
}
_DEEPSEEK_V3 = {
    **{"model_type": "deepseek_v3", "vocab_size": 129280, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6},
    **{"rope_theta": 1e4, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "v_head_dim": 128},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "first_k_dense_replace": 3, "moe_intermediate_size": 2048},
    **{"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 8, "topk_group": 4},
}
_GEMMA3 = {
    **{"model_type": "gemma3_text", "vocab_size": 262144, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
    **{"rope_theta": 1e6, "rope_local_base_freq": 1e4, "head_dim": 256, "query_pre_attn_scalar": 256},
    **{"sliding_window": 512, "sliding_window_pattern": 6, "hidden_activation": "gelu_pytorch_tanh"},
}
_DEEPSEEK_V2 = {
    **{"model_type": "deepseek_v2", "vocab_size": 102400, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6},
    **{"rope_theta": 1e4, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512, "v_head_dim": 128},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "first_k_dense_replace": 1, "moe_intermediate_size": 1408},
    **{"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
    **{"topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0},
}
_ORDER = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
_MODELS = {
    "Qwen2.5-0.5B": (_QWEN2 | {"vocab_size": 151936, "num_key_value_heads": 2}, (896, 4864, 14, 24)),
    "Qwen2.5-7B": (_QWEN2 | {"vocab_size": 152064, "num_key_value_heads": 4}, (3584, 18944, 28, 28)),
    "Llama-3-8B": (_LLAMA3, (4096, 14336, 32, 32)),
    "Llama-3-8B-1048k": (_LLAMA3 | _LONG, (4096, 14336, 32, 32)),
    "Llama-3-70B": (_LLAMA3, (8192, 28672, 64, 80)),
    "Gemma-2-2B": (_GEMMA2 | {"num_key_value_heads": 4}, (2304, 9216, 8, 26)),
    "Gemma-2-9B": (_GEMMA2 | {"num_key_value_heads": 8}, (3584, 14336, 16, 42)),
    "Qwen3-30B-A3B": (_QWEN3_MOE, (2048, 6144, 32, 48)),
    "gpt-oss-20b": (_GPT_OSS, (2880, 2880, 64, 24)),
    "gpt-oss-120b": (_GPT_OSS | {"num_local_experts": 128}, (2880, 2880, 64, 36)),
    "DeepSeek-V3": (_DEEPSEEK_V3, (7168, 18432, 128, 61)),
    "Gemma-3-1B": (_GEMMA3 | {"num_key_value_heads": 1}, (1152, 6912, 4, 26)),
    "DeepSeek-V2-Lite": (_DEEPSEEK_V2, (2048, 10944, 16, 27)),
    "Mixtral-8x7B": (_MIXTRAL, (4096, 14336, 32, 32)),
}
SHAPES = {name: config | dict(zip(_ORDER, sizes, strict=True)) for name, (config, sizes) in _MODELS.items()}


def write_shapes(directory: Path) -> None:
    """Writes a directory with a config.json for each model."""
    for name, shape in SHAPES.items():
        path = directory / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(shape, indent=2) + "\n")


if __name__ == "__main__":
    write_shapes(Path(sys.argv[1]))
