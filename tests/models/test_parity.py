"""Every site of every layer against Hugging Face transformers, in float32."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.core.sites import ActivationKey, Site, activation_keys
from pipeline.models.head import head_leaf, logits
from pipeline.models.registry import Model, open_model
from pipeline.models.weight_specs import has_site
from tests.models.hf_reference import NUM_LAYERS, VOCAB_SIZE, reference_activations, save_random, torch

pytestmark = pytest.mark.heavy
LENGTH = 96  # of rows; longer than every window
DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 24}
OTHER_THETA = {"rope_type": "default", "rope_theta": 250000.0}
SECTIONS = {"rope_type": "default", "rope_theta": 300.0, "mrope_section": [1, 2, 1]}
SCALED_QUERIES = {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 24}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
MSCALE_ROPE = YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.3}
YARN_ROPES = {"full_attention": YARN_ROPE | {"attention_factor": 1.5}, "sliding_attention": {"rope_type": "default"}}
# Some documents of the packings are longer than the original context.
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 20}
LONG_ROPE |= {"short_factor": [1.0, 1.5, 2.0, 7.5], "long_factor": [9.0] * 4}
WINDOW = {"use_sliding_window": True, "sliding_window": 7}
ALTERNATING = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
TURNS = ["sliding_attention", "full_attention"] * 2
GEMMA = {"head_dim": 6, "sliding_window": 7, "query_pre_attn_scalar": 12}
GEMMA4 = {"layer_types": ALTERNATING, "num_kv_shared_layers": 2, "enable_moe_block": True, "attention_k_eq_v": True}
GEMMA3_ROPES = {"full_attention": LINEAR_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}
DELTA_FIRST = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
OLMOE = {"eos_token_id": None}
MULTIPLIERS = {"embedding_multiplier": 1.7, "attention_multiplier": 0.2, "residual_multiplier": 0.6}
MULTIPLIERS |= {"logits_scaling": 3.0}
GPT_OSS = {"sliding_window": 7}
FAMILIES = {
    "bert": {},
    "cohere": {},
    "cohere2": {"sliding_window": 7, "num_hidden_layers": 2, "layer_types": TURNS[:2]},
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    "deepseek_v3": {"rope_parameters": MSCALE_ROPE},
    "deepseek_v32": {"rope_parameters": MSCALE_ROPE, "num_hidden_layers": 2},
    "exaone4": {"sliding_window": 7, "num_hidden_layers": 2, "layer_types": TURNS[:2]},
    "gemma": {"head_dim": 6},
    "gemma2": GEMMA,
    "gemma3": GEMMA | {"num_hidden_layers": 2, "layer_types": TURNS[:2], "rope_parameters": GEMMA3_ROPES},
    "gemma3_text": GEMMA | {"num_hidden_layers": 2, "layer_types": TURNS[:2]},
    "gemma4_text": GEMMA4,
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "gemma4_unified": {"layer_types": TURNS, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    | {"num_kv_shared_layers": 2},
    "gemma4_unified_text": {"layer_types": ALTERNATING, "num_kv_shared_layers": 1},
    "gpt2": {},
    "gpt_neo": {},
    "gpt_neox": {},
    "gptj": {},
    "granite": MULTIPLIERS,
    "granitemoe": MULTIPLIERS,
    "gpt_oss": GPT_OSS,
    "lfm2": {},
    "llama": {},
    "minimax_m2": {},
    "llama4": {"moe_layers": [0, 3], "no_rope_layers": [1, 0, 1, 1]},
    "llama4_text": {},
    "ministral3": {"head_dim": 6, "rope_parameters": YARN_ROPE | SCALED_QUERIES},
    "mistral": {"sliding_window": 7},
    "mistral3": {"sliding_window": None, "head_dim": 6, "tie_word_embeddings": False},
    "mixtral": {},
    "olmo": {"clip_qkv": 0.4},
    "nemotron_h": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 7, "num_hidden_layers": 2, "layer_types": TURNS[:2]},
    "olmoe": OLMOE,
    "opt": {},
    "phi": {},
    "phi3": {"partial_rotary_factor": 0.5},
    "qwen2": {},
    "qwen2_moe": {"num_hidden_layers": 2, "mlp_only_layers": [1]},
    "qwen2_5_vl": {"rope_parameters": SECTIONS},
    "qwen2_vl": {"rope_parameters": SECTIONS | YARN_ROPE},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_next": DELTA_FIRST,
    "qwen3_5_text": DELTA_FIRST,
    "qwen3_vl": {"head_dim": 8, "rope_parameters": SECTIONS},
    "qwen3_vl_moe": {"rope_parameters": SECTIONS},
    "roberta": {"pad_token_id": 164},
    "seed_oss": {"head_dim": 8},
    "smollm3": WINDOW,
    "stablelm": {},
    "starcoder2": {"sliding_window": 7},
    "xlm-roberta": {"pad_token_id": 90, "type_vocab_size": 1, "layer_norm_eps": 1e-3, "hidden_act": "relu"},
}
CASES = {
    "qwen2 tied, one kv head, window in the last layer, longrope": (
        "qwen2",
        WINDOW
        | {"num_hidden_layers": 2, "max_window_layers": 1, "num_key_value_heads": 1, "tie_word_embeddings": True}
        | {"rope_parameters": LONG_ROPE | {"rope_theta": 1e6}},
    ),
    "lfm2 alternating, biases, two taps, one kv head, untied, linear rope, d_mlp as it is": (
        "lfm2",
        {"layer_types": ["conv", "full_attention"] * 2, "conv_bias": True, "conv_L_cache": 2, "norm_eps": 1e-3}
        | {"num_key_value_heads": 1, "tie_word_embeddings": False, "rope_parameters": LINEAR_ROPE}
        | {"block_auto_adjust_ff_dim": False},
    ),
    "nemotron h, attention first, one group, biases, long time steps, two taps, silu, two periods": (
        "nemotron_h",
        {"layers_block_type": ["full_attention", "linear_attention", "mlp"] * 2, "n_groups": 1, "mlp_bias": True}
        | {"use_bias": True, "time_step_min": 0.7, "conv_kernel": 2, "mlp_hidden_act": "silu", "head_dim": 6},
    ),
    "qwen3 biases, one kv head, windows, yarn, head_dim": (
        "qwen3",
        WINDOW
        | {"num_hidden_layers": 2, "layer_types": TURNS[:2], "attention_bias": True, "num_key_value_heads": 1}
        | {"head_dim": 16, "rope_parameters": YARN_ROPE | {"truncate": False, "beta_fast": 4}},
    ),
    "olmo3 biases, tied, all heads, yarn in global layers": (
        "olmo3",
        {"num_hidden_layers": 2, "layer_types": TURNS[:2], "sliding_window": 7, "rope_parameters": YARN_ROPES}
        | {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "smollm3 windows where it rotates, yarn, one kv head, biases, untied": (
        "smollm3",
        WINDOW
        | {"layer_types": ALTERNATING, "no_rope_layers": [1, 1, 0, 0, 0], "rope_parameters": YARN_ROPE}
        | {"num_key_value_heads": 1, "head_dim": 6}
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "phi3 window, tied, one kv head, longrope, partly rotating": (
        "phi3",
        {"sliding_window": 7, "partial_rotary_factor": 0.75, "tie_word_embeddings": True, "num_key_value_heads": 1}
        | {"original_max_position_embeddings": 20}
        | {"rope_parameters": LONG_ROPE | {"short_factor": [1.0, 1.5, 7.5], "long_factor": [9.0] * 3}},
    ),
    "gemma3 scaled global rope": (
        "gemma3_text",
        GEMMA
        | {"num_hidden_layers": 2, "layer_types": TURNS[:2], "num_key_value_heads": 1, "rope_parameters": GEMMA3_ROPES},
    ),
    "gemma4, experts beside the MLP, values are keys in global layers, biases, other ropes": (
        "gemma4_text",
        {"layer_types": TURNS, "enable_moe_block": True, "top_k_experts": 6, "attention_k_eq_v": True}
        | {"num_global_key_value_heads": 1, "attention_bias": True, "rope_parameters": GEMMA3_ROPES},
    ),
    "gemma4, all heads alike, window longer than the row, last layer with another's keys and wider": (
        "gemma4_text",
        {"num_hidden_layers": 3, "layer_types": ALTERNATING[:3], "num_kv_shared_layers": 1, "sliding_window": 600}
        | {"global_head_dim": 8, "use_double_wide_mlp": True, "final_logit_softcapping": 2.0},
    ),
    "gpt-neox sequential, without biases": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "gpt-neox odd heads, half rotating, yarn": (
        "gpt_neox",
        {"hidden_size": 36, "rope_parameters": YARN_ROPE | {"partial_rotary_factor": 0.5}},
    ),
    "opt norms without weights": ("opt", {"layer_norm_elementwise_affine": False, "hidden_size": 28}),
    "phi norms of heads, one kv head, tied": (
        "phi",
        {"qk_layernorm": True, "num_key_value_heads": 1, "tie_word_embeddings": True, "partial_rotary_factor": 0.75},
    ),
    "qwen3 moe, one expert, a dense layer, window, biases": (
        "qwen3_moe",
        WINDOW
        | {"num_hidden_layers": 2, "mlp_only_layers": [0], "num_experts_per_tok": 1}
        | {"attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen2 moe, norm_topk_prob, first layer dense, window": (
        "qwen2_moe",
        WINDOW
        | {"num_hidden_layers": 2, "mlp_only_layers": [0], "norm_topk_prob": True}
        | {"shared_expert_intermediate_size": 9, "qkv_bias": False},
    ),
    "qwen3.5, alternating, tied, heads alike, half rotating, two taps": (
        "qwen3_5_text",
        {"layer_types": ["full_attention", "linear_attention"] * 2, "tie_word_embeddings": True, "head_dim": 8}
        | {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 2, "attention_bias": True, "hidden_act": "gelu"}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.5}},
    ),
    "qwen3-next, DeltaNet at last, a dense layer, biases": (
        "qwen3_next",
        {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"], "mlp_only_layers": [0]}
        | {"norm_topk_prob": False, "attention_bias": True, "linear_num_value_heads": 6},
    ),
    "mixtral, window, three experts, head_dim, gelu": (
        "mixtral",
        {"sliding_window": 7, "num_experts": 3, "head_dim": 6, "hidden_act": "gelu"},
    ),
    "olmoe, norm_topk_prob, biases": ("olmoe", OLMOE | {"norm_topk_prob": True, "attention_bias": True}),
    "stablelm parallel, biases, half rotating": (
        "stablelm",
        {"use_parallel_residual": True, "use_qkv_bias": True, "partial_rotary_factor": 0.5},
    ),
    "gpt-oss, tied, yarn with another factor, one expert, one kv head": (
        "gpt_oss",
        GPT_OSS
        | {"rope_parameters": YARN_ROPE | {"truncate": False}, "head_dim": 16}
        | {"tie_word_embeddings": True, "num_key_value_heads": 1, "num_experts_per_tok": 1, "swiglu_limit": 0.3},
    ),
    "deepseek v2, one of the groups, yarn with mscale, biases, tied": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "topk_group": 1, "routed_scaling_factor": 1.7}
        | {"rope_parameters": MSCALE_ROPE, "attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    ),
    "deepseek v2, lite: plain, narrow queries, greedy choice of three, one scale for yarn, no dense layer": (
        "deepseek_v2",
        {"num_hidden_layers": 2, "first_k_dense_replace": 0, "q_lora_rank": None, "num_experts_per_tok": 3}
        | {"v_head_dim": 16, "qk_nope_head_dim": 2}
        | {"rope_parameters": YARN_ROPE | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek v3, all groups, three shared experts, biases, yarn without mscale": (
        "deepseek_v3",
        {"num_hidden_layers": 3, "topk_group": 3, "n_shared_experts": 3, "attention_bias": True}
        | {"rope_parameters": YARN_ROPE},
    ),
    "deepseek v3, plain queries, norm_topk_prob off, other pairs, one group": (
        "deepseek_v3",
        {"q_lora_rank": None, "norm_topk_prob": False, "rope_interleave": False, "topk_group": 1}
        | {"rms_norm_eps": 1e-3},
    ),
}
FURTHER_CASES = {
    "exaone4 without windows, so rotating everywhere, yarn, tied, one kv head": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * NUM_LAYERS, "rope_parameters": YARN_ROPE}
        | {"tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "seed_oss, other biases, tied, llama3 rope": (
        "seed_oss",
        {"head_dim": 6, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True}
        | {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    ),
    "starcoder2 without biases and window, untied, all heads, yarn, relu": (
        "starcoder2",
        {"use_bias": False, "tie_word_embeddings": False, "num_key_value_heads": 4, "rope_parameters": YARN_ROPE}
        | {"hidden_act": "relu", "norm_epsilon": 1e-2},
    ),
    "mistral without window, dynamic rope, head_dim": (
        "mistral",
        {"sliding_window": None, "head_dim": 6, "rope_parameters": DYNAMIC_ROPE, "max_position_embeddings": 96},
    ),
    "llama4, every second layer sparse, biases, three experts, one kv head, without norms, llama3 rope": (
        "llama4_text",
        {"interleave_moe_layer_step": 2, "no_rope_layer_interval": 2, "attention_bias": True, "use_qk_norm": False}
        | {"num_experts_per_tok": 3, "num_key_value_heads": 1, "rope_parameters": LLAMA3_ROPE},
    ),
    "gemma2 low caps": ("gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 5}),
    "qwen3.5 moe": ("qwen3_5_moe_text", DELTA_FIRST | {"linear_num_key_heads": 1, "linear_num_value_heads": 3}),
    "cohere2 without windows, so without rotation": (
        "cohere2",
        {"sliding_window": 7, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
    ),
    "glm4_moe norms of heads, biases, two shared experts, scaled": (
        "glm4_moe",
        {"use_qk_norm": True, "attention_bias": True, "n_shared_experts": 2, "routed_scaling_factor": 2.5}
        | {"n_group": 1, "topk_group": 1, "tie_word_embeddings": True},
    ),
    "minimax_m2 all experts, one kv head, a quarter rotating": (
        "minimax_m2",
        {"num_experts_per_tok": 6, "num_key_value_heads": 1, "head_dim": 16}
        | {"rope_parameters": OTHER_THETA | {"partial_rotary_factor": 0.25}},
    ),
    "deepseek v3.2, weights as they are, all sparse, longer choice of keys": (
        "deepseek_v32",
        {"num_hidden_layers": 2, "first_k_dense_replace": 0, "norm_topk_prob": False, "index_topk": 500},
    ),
    "llama4, dense, chunks longer than the row": (
        "llama4",
        {"num_hidden_layers": 2, "moe_layers": [], "no_rope_layers": [0, 1], "attention_chunk_size": 600},
    ),
    "ministral3 in mistral3, yarn without scales, all heads": (
        "mistral3",
        {"model_type": "ministral3", "head_dim": 6, "num_key_value_heads": 4}
        | {"rope_parameters": MSCALE_ROPE | {"mscale_all_dim": 0.0, "llama_4_scaling_beta": 0}},
    ),
    "qwen2.5 vl, windows, one kv head, tied": (
        "qwen2_5_vl",
        WINDOW
        | {"num_hidden_layers": 2, "max_window_layers": 1, "num_key_value_heads": 1, "tie_word_embeddings": True}
        | {"rope_parameters": SECTIONS | LINEAR_ROPE},
    ),
    "qwen3 vl, biases, one kv head, tied, wide heads": (
        "qwen3_vl",
        {"head_dim": 12, "num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True}
        | {"rope_parameters": SECTIONS | {"mrope_section": [2, 2, 2], "mrope_interleaved": True}},
    ),
    "qwen3 vl moe, a dense layer, biases, three experts": (
        "qwen3_vl_moe",
        {"num_hidden_layers": 2, "mlp_only_layers": [0], "num_experts_per_tok": 3, "attention_bias": True}
        | {"head_dim": 12, "tie_word_embeddings": True, "rope_parameters": SECTIONS | {"mrope_section": [2, 2, 2]}},
    ),
    "olmoe, queries, keys and values clipped": ("olmoe", OLMOE | {"clip_qkv": 0.4}),
    "deepseek v3.2, sparse layers first, biases, tied": (
        "deepseek_v32",
        {"num_hidden_layers": 2, "mlp_layer_types": ["sparse", "dense"], "attention_bias": True}
        | {"tie_word_embeddings": True, "n_group": 1, "topk_group": 1},
    ),
    "lfm2 attention first, five taps, wider MLP": (
        "lfm2",
        {
            "layer_types": ["full_attention", "conv"],
            "num_hidden_layers": 2,
            "conv_L_cache": 5,
            "block_ffn_dim_multiplier": 1.3,
        },
    ),
    "nemotron h, a group per head, no biases, one kv head": (
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "full_attention"], "n_groups": 6, "use_conv_bias": False}
        | {"num_key_value_heads": 1, "layer_norm_epsilon": 1e-3},
    ),
    "llama4, other layers in chunks, without scales, all heads, tied, wide heads": (
        "llama4_text",
        {"layer_types": ["full_attention", "chunked_attention"] * 2, "attn_temperature_tuning": False, "head_dim": 12}
        | {"num_key_value_heads": 4, "tie_word_embeddings": True, "hidden_act": "gelu"},
    ),
    "gemma4 unified, last layers with another's keys and wider, one kv head": (
        "gemma4_unified_text",
        {"layer_types": TURNS, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "num_key_value_heads": 1},
    ),
    "gpt_neo local first, then global, untied": (
        "gpt_neo",
        {"num_hidden_layers": 3, "attention_types": [[["local"], 1], [["global"], 2]], "window_size": 3}
        | {"tie_word_embeddings": False},
    ),
}
"""Variants of families whose parts other cases test, too. They are slow only in sum."""
WITH_VISION = ("gemma3", "gemma4_unified", "llama4", "mistral3", "qwen2_vl")
"""Also slow: models with vision whose language model is that of another family. `test_families.py` compares names."""
COMBINED = ("gemma4_unified_text", "qwen2_5_vl", "qwen3_vl_moe", *(family for family, _ in CASES.values()))
"""Also slow: families whose parts are those of another fast row, and families that a case tests with other parts."""
SCANNED = {
    "alike": "llama",
    "local and global with two ropes": "gemma3 scaled global rope",
    "local and global, rotated and not": "smollm3 windows where it rotates, yarn, one kv head, biases, untied",
    "local and global, one norm for attention and MLP, adjacent pairs": "cohere2",
    "norms without weights": "opt norms without weights",
    "outputs of blocks scaled": "granite",
    "chunked and global, queries with scales": "llama4_text",
    "sparse and latent": "deepseek v3, all groups, three shared experts, biases, yarn without mscale",
    "DeltaNet and attention, two periods": "qwen3.5, alternating, tied, heads alike, half rotating, two taps",
    "convolution and attention, two periods": (
        "lfm2 alternating, biases, two taps, one kv head, untied, linear rope, d_mlp as it is"
    ),
    "one block per layer, two periods": (
        "nemotron h, attention first, one group, biases, long time steps, two taps, silu, two periods"
    ),
    "inputs of layers, local and global heads, two periods": (
        "gemma4, experts beside the MLP, values are keys in global layers, biases, other ropes"
    ),
    "two layers with the keys of another one, experts beside MLPs": "gemma4_text",
}
"""Models whose layers are also computed by a scan: a capture of the last residual stream alone needs no layer apart."""
SLOW = {*FURTHER_CASES, *WITH_VISION, *COMBINED} - {*SCANNED.values()}


ALIKE = (
    *("bert", "cohere", "deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3", "gemma3_text", "glm", "glm4"),
    *("glm4_moe", "gpt2", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "llama", "minimax_m2", "ministral3"),
    *("mistral", "mistral3", "mixtral", "olmo", "olmo2", "olmoe", "opt", "phi", "phi3", "qwen2", "qwen2_5_vl"),
    *("qwen2_moe", "qwen2_vl", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", "roberta", "seed_oss", "stablelm"),
    *("starcoder2", "xlm-roberta"),
)
"""Two layers of these families test as much as four: layers are alike, alternate, or only the first is dense."""
OF_LAYERS = {"layer_types", "max_window_layers", "mlp_only_layers", "decoder_sparse_step", "first_k_dense_replace"}


def layers_that_suffice(family: str, overrides: dict) -> dict[str, int]:
    """Overrides that reduce a model to two layers, if these test as much as four."""
    return {"num_hidden_layers": 2} if family in ALIKE and not OF_LAYERS & overrides.keys() else {}


class Forward:
    """A random model of a family, and its forward pass for every site of every layer, compiled once for a shape."""

    def __init__(self, path: Path, family: str, overrides: dict) -> None:
        self.reference = save_random(family, path, **layers_that_suffice(family, overrides) | overrides)
        self.model = open_model(str(path))
        keys = activation_keys(tuple(range(self.model.num_layers)), self.model.sites)
        self.keys = tuple(
            key for key in keys if not key.site.per_layer or has_site(self.model.arch, key.layer, key.site)
        )
        self._params = self.model.load(self.keys, "float32", DEVICE)
        self._apply = jax.jit(self.model.apply, static_argnames="keys")

    def __call__(self, tokens: np.ndarray, segments: np.ndarray, positions: np.ndarray) -> dict:
        batch = (jnp.array(ids) for ids in (tokens, segments, positions))
        captured = self._apply(self._params, *batch, keys=self.keys)
        return {key: np.asarray(value, np.float32) for key, value in captured.items()}

    def scanned(self, *batch: np.ndarray) -> np.ndarray:
        """The last residual stream, captured alone, so that a scan computes the layers."""
        params = self.model.load((self.last_key,), "float32", DEVICE)
        return np.asarray(self._apply(params, *map(jnp.array, batch), keys=(self.last_key,))[self.last_key])

    def logits(self, final_norm: np.ndarray) -> np.ndarray:
        """The head's output for the last norm's output [1, T, D]."""
        leaves = head_leaf(self.model.head, self.model.arch)
        params = self._params | self.model.load_leaves(leaves, "float32", DEVICE)
        return np.asarray(logits(self.model.head, params, jnp.array(final_norm[0])))[None]

    @property
    def last_key(self) -> ActivationKey:
        return ActivationKey(self.model.num_layers - 1, Site.resid_post)


@pytest.fixture(scope="module")
def forward(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Forward:
    """The model of a family or a case. pytest runs all tests of a model before those of the next one."""
    family, overrides = (CASES | FURTHER_CASES).get(request.param) or (request.param, FAMILIES[request.param])
    return Forward(tmp_path_factory.mktemp("model"), family, overrides)


DOCUMENTS = [(0, 0, 17), (0, 17, 40), (0, 57, 5), (1, 0, LENGTH)]
"""Row, first position and length. The rest of row 0 is padding; row 1 is longer than every window."""


def packed() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, segments and positions of the documents."""
    tokens = np.random.default_rng(1).integers(0, VOCAB_SIZE, (2, LENGTH), dtype=np.int32)
    segments, positions = np.zeros((2, 2, LENGTH), np.int32)
    for number, (row, first, length) in enumerate(DOCUMENTS, start=1):
        segments[row, first : first + length] = number
        positions[row, first : first + length] = np.arange(length)
    return tokens, segments, positions


def error(got: np.ndarray, expected: np.ndarray) -> float:
    """The largest deviation, relative to the largest value of the site."""
    return float(np.max(np.abs(got - expected)) / np.max(np.abs(expected)))


def bound(key: ActivationKey, model: Model) -> float:
    """1e-5 per layer that the activations went through. Rounding in float32 depends on the CPU."""
    return 1e-5 * (key.layer + 1 if key.site.per_layer else model.num_layers)


@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else [])
        for case in (*FAMILIES, *CASES, *FURTHER_CASES)
    ],
    indirect=True,
)
def test_every_site_of_packed_documents_equals_transformers(forward: Forward) -> None:
    """Of every layer. transformers gets each document alone."""
    batch, model, keys, reference = packed(), forward.model, forward.keys, forward.reference
    got = forward(*batch)
    assert {key: values.shape[2] for key, values in got.items()} == {key: model.width(key, LENGTH) for key in keys}
    assert all(np.isfinite(values).all() for values in got.values())
    for row, first, length in DOCUMENTS:
        expected = reference_activations(reference, batch[0][row : row + 1, first : first + length])
        assert {key for key in expected if not key.site.per_layer or key.site in model.sites} == {*keys}
        for key in keys:
            found = got[key][row : row + 1, first : first + length]
            if key.site is Site.attn_pattern:
                patterns = found.reshape(1, length, -1, LENGTH)
                assert not patterns[..., length:].any()
                found = patterns[..., :length].reshape(1, length, -1)
            assert error(found, expected[key]) <= bound(key, model), key.name
    if model.head is not None:
        assert error(forward.logits(found), hf_logits(reference, batch[0][1:])) < 1e-4


def hf_logits(reference, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return reference(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()


@pytest.mark.parametrize("forward", SCANNED.values(), ids=SCANNED.keys(), indirect=True)
def test_scanned_layers_equal_transformers(forward: Forward) -> None:
    batch, last = packed(), forward.last_key
    expected = reference_activations(forward.reference, batch[0][1:])[last]
    assert error(forward.scanned(*batch)[1:], expected) < bound(last, forward.model)


@pytest.mark.parametrize("parameters", [LINEAR_ROPE, YARN_ROPE, OTHER_THETA])
def test_an_older_config_gives_the_same_model(parameters: dict, tmp_path) -> None:
    save_random("llama", tmp_path, rope_parameters=parameters)
    newer = open_model(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    if scaling["rope_type"] == "linear":
        scaling["type"] = scaling.pop("rope_type")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_model(str(tmp_path)).arch == newer.arch
    identity = open_model(str(tmp_path)).identity()
    assert identity == newer.identity() == json.loads(json.dumps(identity))
