"""Tiny random Hugging Face models, saved as checkpoints, and their activations, recorded by hooks."""

import copy
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.sites import ActivationKey, Site

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402  needs torch

NUM_LAYERS = 4
VOCAB_SIZE = 199
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 24},
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 18,
    "n_routed_experts": 6,
    "first_k_dense_replace": 1,
}
GLM4_MOE = {"n_routed_experts": 6, "n_group": 3, "topk_group": 2, "num_mtp_layers": 0}
LATENT |= {"qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 7, "n_group": 3, "topk_group": 2}
DELTA = {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 10}
DELTA |= {"rms_norm_eps": 1e-2}  # a norm follows q k^T v: with a small eps it would amplify rounding errors
OWN_SIZES = {
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "glm4_moe": GLM4_MOE,
    "minimax_m2": {"num_local_experts": 6, "head_dim": 8, "rope_parameters": {"partial_rotary_factor": 0.5}},
    "gpt2": {"n_inner": SIZES["intermediate_size"]},
    "gpt_neo": {"attention_types": [[["global", "local"], NUM_LAYERS // 2]], "window_size": 7},
    "gptj": {"n_inner": SIZES["intermediate_size"], "rotary_dim": 6},
    "granitemoe": {"num_local_experts": 6},
    "opt": {"ffn_dim": SIZES["intermediate_size"]},
    "gpt_oss": {"head_dim": 8},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), LATENT),
    "deepseek_v32": LATENT | {"index_topk": 96, "index_n_heads": 2, "index_head_dim": 8},
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), DELTA),
    "llama4_text": {"intermediate_size": 20, "intermediate_size_mlp": 48, "num_local_experts": 6, "head_dim": 8}
    | {"attention_chunk_size": 7, "floor_scale": 5, "attn_scale": 0.5, "num_experts_per_tok": 1},
    "gemma4_unified_text": {"head_dim": 8, "sliding_window": 7, "global_head_dim": 12, "rms_norm_eps": 1e-2}
    | {"pad_token_id": 0},
    "lfm2": {"block_multiple_of": 12, "full_attn_idxs": [1]},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "head_dim": 8,
    }
    | {"mamba_num_heads": 6, "mamba_head_dim": 5, "ssm_state_size": 7, "n_groups": 2, "layer_norm_epsilon": 1e-2},
    "gemma4_text": {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 6, "head_dim": 8}
    | {"top_k_experts": 2, "sliding_window": 7, "global_head_dim": 12}
    | {"rms_norm_eps": 1e-2},  # as in DELTA: a norm follows products of gates and inputs
}
SIGLIP = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "patch_size": 2}
SIGLIP |= {"image_size": 32, "model_type": "siglip_vision_model"}
PIXTRAL = {"model_type": "pixtral", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
PIXTRAL |= {"num_attention_heads": 2, "patch_size": 2, "image_size": 32}
QWEN_VISION = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 32}
QWEN_VISION |= {"patch_size": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
LLAMA4_VISION = {"hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA4_VISION |= {"image_size": 16, "patch_size": 4, "projector_input_dim": 8, "projector_output_dim": 8}
LLAMA4_VISION |= {"vision_output_dim": 8}
MULTIMODAL = {
    "gemma3": ("gemma3_text", SIGLIP),
    "gemma4_unified": ("gemma4_unified_text", {"patch_size": 2, "mm_embed_dim": 8, "mm_posemb_size": 4}),
    "llama4": ("llama4_text", LLAMA4_VISION),
    "mistral3": ("mistral", PIXTRAL),
    "qwen2_5_vl": ("qwen2_5_vl_text", QWEN_VISION),
    "qwen2_vl": ("qwen2_vl_text", {"depth": 1, "embed_dim": 8, "num_heads": 2, "hidden_size": 32, "patch_size": 2}),
    "qwen3_vl": ("qwen3_vl_text", QWEN_VISION),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", QWEN_VISION),
}
"""The type of the language model, and the configuration of vision."""

LLAMA_PLACES = {
    Site.embed: "embed_tokens output",
    Site.resid_pre: "layers.* input",
    Site.attn_in: "layers.*.self_attn.q_proj input",
    Site.attn_out: "layers.*.self_attn output",
    Site.resid_mid: "layers.*.post_attention_layernorm input",
    Site.mlp_in: "layers.*.mlp input",
    Site.mlp_pre: "layers.*.mlp.gate_proj output",
    Site.mlp_pre_linear: "layers.*.mlp.up_proj output",
    Site.mlp_post: "layers.*.mlp.down_proj input",
    Site.mlp_out: "layers.*.mlp output",
    Site.resid_post: "layers.* output",
    Site.final_norm: "norm output",
}
GEMMA_PLACES = LLAMA_PLACES | {
    Site.attn_out: "layers.*.post_attention_layernorm output",
    Site.resid_mid: "layers.*.pre_feedforward_layernorm input",
    Site.mlp_out: "layers.*.post_feedforward_layernorm output",
}
ROUTED_PLACES = {
    Site.router_logits: "layers.*.mlp.gate output 0",
    Site.router_weights: "layers.*.mlp.gate output 1",
    Site.router_indices: "layers.*.mlp.gate output 2",
}
FUSED_PLACES = {
    Site.mlp_pre: "layers.*.mlp.activation_fn input",
    Site.mlp_pre_linear: "layers.*.mlp.gate_up_proj output second",
}
DELTA_PLACES = LLAMA_PLACES | {
    Site.attn_in: "layers.*.input_layernorm output",
    Site.attn_z: "layers.*.self_attn.o_proj input",
    Site.attn_out: ("layers.*.self_attn output", "layers.*.linear_attn output"),
}
GPT2_PLACES = {
    Site.embed: "drop output",
    Site.resid_pre: "h.* input",
    Site.attn_in: "h.*.attn.c_attn input",
    Site.attn_out: "h.*.attn output",
    Site.resid_mid: "h.*.ln_2 input",
    Site.mlp_in: "h.*.mlp input",
    Site.mlp_pre: "h.*.mlp.c_fc output",
    Site.mlp_post: "h.*.mlp.c_proj input",
    Site.mlp_out: "h.*.mlp output",
    Site.resid_post: "h.* output",
    Site.final_norm: "ln_f output",
}
UNGATED_PLACES = LLAMA_PLACES | {Site.mlp_pre: "layers.*.mlp.fc1 output", Site.mlp_post: "layers.*.mlp.fc2 input"}
UNGATED_PLACES = {site: place for site, place in UNGATED_PLACES.items() if site is not Site.mlp_pre_linear}
OPT_PLACES = UNGATED_PLACES | {
    Site.embed: "layers.0 input",
    Site.resid_mid: "layers.*.final_layer_norm input",
    Site.mlp_in: "layers.*.fc1 input",
    Site.mlp_pre: "layers.*.fc1 output",
    Site.mlp_post: "layers.*.fc2 input",
    Site.mlp_out: "layers.*.fc2 output",
    Site.final_norm: "final_layer_norm output",
}
GRANITE_PLACES = LLAMA_PLACES | {Site.embed: "layers.0 input"}
LLAMA4_PLACES = {site: place.replace(".mlp", ".feed_forward") for site, place in LLAMA_PLACES.items()}
ENCODERS = ("bert", "roberta", "xlm-roberta")
BERT_PLACES = {
    Site.embed: "embeddings output",
    Site.resid_pre: "encoder.layer.* input",
    Site.attn_in: "encoder.layer.*.attention.self.query input",
    Site.attn_out: "encoder.layer.*.attention.output.dense output",
    Site.resid_mid: "encoder.layer.*.attention output",
    Site.mlp_in: "encoder.layer.*.intermediate input",
    Site.mlp_pre: "encoder.layer.*.intermediate.dense output",
    Site.mlp_post: "encoder.layer.*.output.dense input",
    Site.mlp_out: "encoder.layer.*.output.dense output",
    Site.resid_post: "encoder.layer.* output",
}
PLACES: dict[str, dict[Site, str | tuple[str, ...]]] = {
    "gpt_neo": GPT2_PLACES | {Site.attn_in: "h.*.attn.attention.q_proj input"},
    "gptj": GPT2_PLACES
    | {Site.attn_in: "h.*.attn.q_proj input", Site.mlp_pre: "h.*.mlp.fc_in output"}
    | {Site.mlp_post: "h.*.mlp.fc_out input"},
    "granite": GRANITE_PLACES,
    "granitemoe": {
        site: place.replace("mlp.gate", "block_sparse_moe.router").replace("mlp", "block_sparse_moe")
        for site, place in (GRANITE_PLACES | ROUTED_PLACES).items()
    },
    "opt": {site: f"decoder.{place}" for site, place in OPT_PLACES.items()},
    "phi": UNGATED_PLACES | {Site.final_norm: "final_layernorm output"},
    "qwen3_5_text": DELTA_PLACES,
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), DELTA_PLACES | ROUTED_PLACES),
    "gpt_oss": LLAMA_PLACES | {site: place.replace("gate", "router") for site, place in ROUTED_PLACES.items()},
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32"),
        LLAMA_PLACES | ROUTED_PLACES | {Site.attn_in: "layers.*.self_attn.kv_a_proj_with_mqa input"},
    ),
    **dict.fromkeys(
        ("glm4_moe", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe"),
        LLAMA_PLACES | ROUTED_PLACES,
    ),
    **dict.fromkeys(
        ("cohere", "cohere2", "gemma", "llama", "mistral", "olmo", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm"),
        LLAMA_PLACES,
    ),
    **dict.fromkeys(("ministral3", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"), LLAMA_PLACES),
    "glm": LLAMA_PLACES | FUSED_PLACES,
    "glm4": LLAMA_PLACES
    | FUSED_PLACES
    | {Site.attn_out: "layers.*.post_self_attn_layernorm output", Site.mlp_out: "layers.*.post_mlp_layernorm output"},
    **dict.fromkeys(
        ("llama4", "llama4_text"), LLAMA4_PLACES | {Site.router_logits: "layers.*.feed_forward.router output 1"}
    ),
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text", "gemma4_unified", "gemma4_unified_text"), GEMMA_PLACES),
    "gemma4_text": GEMMA_PLACES
    | {
        Site.router_logits: "layers.*.router.proj output",
        Site.router_weights: "layers.*.router output 1",
        Site.router_indices: "layers.*.router output 2",
    },
    "starcoder2": {
        site: place.replace("fc1", "c_fc").replace("fc2", "c_proj") for site, place in UNGATED_PLACES.items()
    },
    **dict.fromkeys(("exaone4", "olmo2", "olmo3"), GEMMA_PLACES | {Site.resid_mid: "layers.*.mlp input"}),
    "lfm2": LLAMA_PLACES
    | {
        Site.attn_in: "layers.*.operator_norm output",
        Site.attn_out: ("layers.*.self_attn output", "layers.*.conv output"),
        Site.resid_mid: "layers.*.ffn_norm input",
        Site.mlp_in: "layers.*.feed_forward input",
        Site.mlp_pre: "layers.*.feed_forward.w1 output",
        Site.mlp_pre_linear: "layers.*.feed_forward.w3 output",
        Site.mlp_post: "layers.*.feed_forward.w2 input",
        Site.mlp_out: "layers.*.feed_forward output",
        Site.final_norm: "embedding_norm output",
    },
    "nemotron_h": {
        Site.embed: "embeddings output",
        Site.resid_pre: "layers.* input",
        Site.attn_in: ("layers.*.mixer.in_proj input", "layers.*.mixer.q_proj input"),
        Site.attn_out: ("layers.*.mixer.out_proj output", "layers.*.mixer.o_proj output"),
        Site.mlp_in: "layers.*.mixer.up_proj input",
        Site.mlp_pre: "layers.*.mixer.up_proj output",
        Site.mlp_post: "layers.*.mixer.down_proj input",
        Site.mlp_out: "layers.*.mixer.down_proj output",
        Site.resid_post: "layers.* output",
        Site.final_norm: "norm_f output",
    },
    "phi3": LLAMA_PLACES | FUSED_PLACES | {Site.attn_in: "layers.*.self_attn.qkv_proj input"},
    "gpt_neox": {
        Site.embed: "embed_in output",
        Site.resid_pre: "layers.* input",
        Site.attn_in: "layers.*.attention.query_key_value input",
        Site.attn_out: "layers.*.attention output",
        Site.resid_mid: "layers.*.post_attention_layernorm input",
        Site.mlp_in: "layers.*.mlp input",
        Site.mlp_pre: "layers.*.mlp.dense_h_to_4h output",
        Site.mlp_post: "layers.*.mlp.dense_4h_to_h input",
        Site.mlp_out: "layers.*.mlp output",
        Site.resid_post: "layers.* output",
        Site.final_norm: "final_layer_norm output",
    },
    "gpt2": GPT2_PLACES,
    **dict.fromkeys(ENCODERS, BERT_PLACES),
}
"""Each family's sites in transformers: a module of the trunk with its first input or output, an output by number, or
the second half of the output. A layer without the module lacks the site."""


ZERO_CENTRED = ("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Families whose norms multiply by 1 + their weight."""


OUTPUT_PROJECTIONS = (
    *("self_attn.o_proj", "self_attn.out_proj", "self_attn.dense", "mixer.o_proj"),
    *("attn.c_proj", ".attn.out_proj", "attention.out_proj", "attention.dense", "attention.output.dense"),
)
"""Suffixes of modules whose input is z of every head."""


def tiny_config(family: str, **overrides: object):
    """The transformers config of a tiny model of `family` (its `model_type`). In a multimodal model, the overrides are
    those of the language model."""
    config_class = transformers.CONFIG_MAPPING[family]
    if family in MULTIMODAL:
        text_family, vision = MULTIMODAL[family]
        head = {name: overrides.pop(name) for name in ("tie_word_embeddings",) if name in overrides}
        text = tiny_config(overrides.pop("model_type", text_family), **overrides).to_dict()
        return config_class(text_config=text, vision_config=vision, **head)
    own = OWN_SIZES.get(family, {})
    sizes = {name: size for name, size in SIZES.items() if name not in own and hasattr(config_class(), name)}
    return config_class(**copy.deepcopy(sizes | own | overrides))  # transformers adds to `rope_parameters`


def save_random(family: str, path: Path, *, seed: int = 0, max_shard_size: str = "1GB", **overrides: object):
    """A random float32 model of `family` (its `model_type`), saved to `path`. Returns the torch model."""
    torch.manual_seed(seed)
    auto = "ImageTextToText" if family in MULTIMODAL else "MaskedLM" if family in ENCODERS else "CausalLM"
    model = getattr(transformers, f"AutoModelFor{auto}").from_config(tiny_config(family, **overrides)).eval()
    with torch.no_grad():  # the usual initialisation has biases of 0, norms of 1 and almost uniform attention
        for name, parameter in model.named_parameters():
            is_scale = ("norm" in name.lower() or "ln_" in name) and not name.endswith("bias")
            is_centred = family in ZERO_CENTRED and not name.endswith("linear_attn.norm.weight")
            parameter.normal_(1.0 if is_scale and not is_centred else 0.0, 0.25)
            if name.endswith("A_log"):
                parameter.normal_(-2.0, 1.0)  # some states last for several chunks, others do not
            elif name.endswith(("conv1d.weight", "conv.conv.weight")):
                parameter.normal_(0.0, 1.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.25)
            elif name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.25)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if family == "qwen3_vl_moe":  # published files have the transposed matrices of transformers 4
        tensors = load_file(path / "model.safetensors")
        published = {name: array.mT.contiguous() if ".experts." in name else array for name, array in tensors.items()}
        save_file(published, path / "model.safetensors")
    return model


def reference_activations(model, tokens: np.ndarray) -> dict[ActivationKey, np.ndarray]:
    """Every site of every layer for token rows [B, T] without padding."""
    found: dict[ActivationKey, np.ndarray] = {}
    config, trunk = model.config.get_text_config(), model.base_model
    for name in ("language_model", "model"):
        trunk = getattr(trunk, name, trunk)

    def keep(layer: int, site: Site, value, number: int = 0) -> None:
        value = value[number] if isinstance(value, tuple) else value
        found[ActivationKey(layer, site)] = value.detach().float().reshape(*tokens.shape, -1).numpy().copy()

    def hook(site: Site, layer: int, module, side: str, number: str = "0"):
        if number == "second":
            return module.register_forward_hook(lambda _m, _i, output: keep(layer, site, output.chunk(2, -1)[1]))
        if side == "input":
            return module.register_forward_pre_hook(lambda _m, inputs: keep(layer, site, inputs))
        return module.register_forward_hook(lambda _m, _i, output: keep(layer, site, output, int(number)))

    def hook_experts(layer: int, module):
        """Records the output of each chosen expert, of which transformers returns only the weighted sum."""

        def outputs(module, inputs) -> None:
            x, indices, _ = inputs
            gate_up, down = module.gate_up_proj[indices], module.down_proj[indices]
            if module.has_bias:
                neurons = module._apply_gate(
                    torch.einsum("rd,radf->raf", x, gate_up) + module.gate_up_proj_bias[indices]
                )
                chosen = torch.einsum("raf,rafd->rad", neurons, down) + module.down_proj_bias[indices]
            else:
                gate, up = torch.einsum("rd,rafd->raf", x, gate_up).chunk(2, dim=-1)
                chosen = torch.einsum("raf,radf->rad", module.act_fn(gate) * up, down)
            keep(layer, Site.expert_out, chosen)

        return module.register_forward_pre_hook(outputs)

    def keep_scaled_experts(layer: int, module, inputs) -> None:
        """Records the routing and the experts' outputs of Llama 4, which computes all experts, most of them for 0."""
        x = inputs[0].reshape(-1, inputs[0].shape[-1])
        weights, indices = module.router(x)[0].topk(module.top_k)
        gate_up, down = module.experts.gate_up_proj[indices], module.experts.down_proj[indices]
        gate, up = torch.einsum("rad,radf->raf", x[:, None] * weights[..., None], gate_up).chunk(2, dim=-1)
        outputs = torch.einsum("raf,rafd->rad", module.experts.act_fn(gate) * up, down)
        for site, value in ((Site.router_weights, weights), (Site.router_indices, indices), (Site.expert_out, outputs)):
            keep(layer, site, value)

    def hook_heads(layer: int, module):
        """Records TransformerLens' `hook_result`: each head's z times its slice of the output projection."""

        def outputs(module, inputs) -> None:
            inputs_first = transformers.pytorch_utils.Conv1D
            weight = module.weight.T if isinstance(module, inputs_first) else module.weight
            num_heads = config.num_attention_heads
            z, slices = inputs[0].unflatten(-1, (num_heads, -1)), weight.unflatten(1, (num_heads, -1))
            keep(layer, Site.head_out, torch.stack([z[..., n, :] @ slices[:, n].T for n in range(num_heads)], dim=-2))

        return module.register_forward_pre_hook(outputs)

    def attention(module, query, key, value, mask, **options):
        """Calls the model's own eager attention and records its arguments, which have the shape [B, heads, T, H]."""
        z, weights = sys.modules[type(module).__module__].eager_attention_forward(
            module, query, key, value, mask, **options
        )
        if model.config.model_type == "opt":  # scales its queries before attention
            query = query / module.scaling
        return keep_attention(module, query, key, value, z, weights)

    def keep_attention(module, query, key, value, z, weights):
        keep(module.layer_idx, Site.q, query.transpose(1, 2))
        if not getattr(module, "is_kv_shared_layer", False):
            keep(module.layer_idx, Site.k, key.transpose(1, 2))
            keep(module.layer_idx, Site.v, value.transpose(1, 2))
        keep(module.layer_idx, Site.attn_z, z)
        keep(module.layer_idx, Site.attn_pattern, weights.transpose(1, 2))
        if hasattr(module, "sinks"):
            weights = torch.cat([weights, (1 - weights.sum(-1, keepdim=True)).clamp(min=0)], dim=-1)
        keep(module.layer_idx, Site.attn_entropy, torch.special.entr(weights).sum(-1).transpose(1, 2)[..., None])
        return z, weights

    def hook_attention(layer: int, module):
        """Records the attention of GPT-Neo and GPT-J, which is a method."""
        module.layer_idx, compute = layer, module._attn

        def attention(query, key, value, mask):
            z, weights = compute(query, key, value, mask)
            keep_attention(module, query, key, value, z.transpose(1, 2), weights)
            return z, weights

        module._attn = attention

    transformers.AttentionInterface.register("looked_at", attention)
    transformers.AttentionMaskInterface.register("looked_at", transformers.masking_utils.eager_mask)
    model.set_attn_implementation("looked_at")
    handles = []
    for site, places in PLACES[model.config.model_type].items():
        for place in (places,) if isinstance(places, str) else places:
            name, *side = place.split()
            for layer in range(config.num_hidden_layers) if site.per_layer else (-1,):
                with suppress(AttributeError):
                    module = trunk.get_submodule(name.replace("*", str(layer)))
                    handles.append(hook(site, layer, module, *side))
    for name, module in trunk.named_modules():
        layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if hasattr(module, "_attn"):
            hook_attention(layer, module)
        if name.endswith("feed_forward") and hasattr(module, "experts"):
            handles.append(module.register_forward_pre_hook(partial(keep_scaled_experts, layer)))
        elif name.endswith(".experts") and "feed_forward" not in name:
            handles.append(hook_experts(layer, module))
        if name.endswith(OUTPUT_PROJECTIONS):
            handles.append(hook_heads(layer, module))
    with torch.no_grad():
        model(torch.from_numpy(tokens.astype(np.int64)))
    for handle in handles:
        handle.remove()
    for module in model.base_model.modules():
        vars(module).pop("_attn", None)
    for key, values in found.items():
        if key.site in (Site.attn_out, Site.mlp_out):
            values *= getattr(model.config, "residual_multiplier", 1)  # Granite's layers multiply their outputs
    model.set_attn_implementation("eager")  # does not record anything
    if model.config.model_type.startswith(("deepseek", "glm4_moe", "minimax")):
        sort_experts(found)
    return found


def sort_experts(found: dict[ActivationKey, np.ndarray]) -> None:
    """Sorts each token's experts by weight, since routers in DeepSeek's manner return them in no particular order."""
    for key, weights in list(found.items()):
        if key.site is Site.router_weights:
            order = np.argsort(-weights, axis=-1, kind="stable")
            for site in (Site.router_weights, Site.router_indices, Site.expert_out):
                chosen = found[ActivationKey(key.layer, site)]
                by_expert = chosen.reshape(*weights.shape, -1)
                chosen[...] = np.take_along_axis(by_expert, order[..., None], axis=2).reshape(chosen.shape)
