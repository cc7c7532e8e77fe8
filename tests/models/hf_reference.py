"""Tiny random Hugging Face models, saved as checkpoints, and their activations, recorded by hooks."""

import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.sites import ActivationKey, Site

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

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
LATENT |= {"qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 7, "n_group": 3, "topk_group": 2}
DELTA = {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 10}
DELTA |= {"rms_norm_eps": 1e-2}  # a norm follows q k^T v: with a small eps it would amplify rounding errors
OWN_SIZES = {
    "gpt2": {"n_inner": SIZES["intermediate_size"]},
    "gpt_oss": {"head_dim": 8},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), LATENT),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), DELTA),
    "gemma4_text": {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 6, "head_dim": 8}
    | {"top_k_experts": 2, "sliding_window": 7, "global_head_dim": 12}
    | {"rms_norm_eps": 1e-2},  # as in DELTA: a norm follows products of gates and inputs
}
CLASSES = {
    "bert": ("BertConfig", "BertForMaskedLM"),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gemma4_text": ("Gemma4TextConfig", "Gemma4ForCausalLM"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM"),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
}

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
DELTA_PLACES = LLAMA_PLACES | {
    Site.attn_in: "layers.*.input_layernorm output",
    Site.attn_z: "layers.*.self_attn.o_proj input",
    Site.attn_out: ("layers.*.self_attn output", "layers.*.linear_attn output"),
}
PLACES: dict[str, dict[Site, str | tuple[str, ...]]] = {
    "qwen3_5_text": DELTA_PLACES,
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), DELTA_PLACES | ROUTED_PLACES),
    "gpt_oss": LLAMA_PLACES | {site: place.replace("gate", "router") for site, place in ROUTED_PLACES.items()},
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3"),
        LLAMA_PLACES | ROUTED_PLACES | {Site.attn_in: "layers.*.self_attn.kv_a_proj_with_mqa input"},
    ),
    **dict.fromkeys(("mixtral", "olmoe", "qwen2_moe", "qwen3_moe"), LLAMA_PLACES | ROUTED_PLACES),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3"), LLAMA_PLACES),
    **dict.fromkeys(("gemma2", "gemma3_text"), GEMMA_PLACES),
    "gemma4_text": GEMMA_PLACES
    | {
        Site.router_logits: "layers.*.router.proj output",
        Site.router_weights: "layers.*.router output 1",
        Site.router_indices: "layers.*.router output 2",
    },
    **dict.fromkeys(("olmo2", "olmo3"), GEMMA_PLACES | {Site.resid_mid: "layers.*.mlp input"}),
    "phi3": LLAMA_PLACES
    | {
        Site.attn_in: "layers.*.self_attn.qkv_proj input",
        Site.mlp_pre: "layers.*.mlp.activation_fn input",
        Site.mlp_pre_linear: "layers.*.mlp.gate_up_proj output second",
    },
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
    "gpt2": {
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
    },
    "bert": {
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
    },
}
"""Each family's sites in transformers: a module of the trunk with its first input or output, an output by number, or
the second half of the output. A layer without the module lacks the site."""


ZERO_CENTRED = ("gemma2", "gemma3", "qwen3_5", "qwen3_next")
"""Families whose norms multiply by 1 + their weight."""


OUTPUT_PROJECTIONS = ("self_attn.o_proj", "attn.c_proj", "attention.dense", "attention.output.dense")
"""Suffixes of modules whose input is z of every head."""


def tiny_config(family: str, **overrides: object):
    """The transformers config of a tiny model of `family` (its `model_type`)."""
    config_class = getattr(transformers, CLASSES[family][0])
    own = OWN_SIZES.get(family, {})
    sizes = {name: size for name, size in SIZES.items() if name not in own and hasattr(config_class(), name)}
    return config_class(**sizes | own | overrides)


def save_random(family: str, path: Path, *, seed: int = 0, max_shard_size: str = "1GB", **overrides: object):
    """A random float32 model of `family` (its `model_type`), saved to `path`. Returns the torch model."""
    torch.manual_seed(seed)
    model = getattr(transformers, CLASSES[family][1])(tiny_config(family, **overrides)).eval()
    with torch.no_grad():  # the usual initialisation has biases of 0, norms of 1 and almost uniform attention
        for name, parameter in model.named_parameters():
            is_scale = ("norm" in name.lower() or "ln_" in name) and not name.endswith("bias")
            is_centred = family.startswith(ZERO_CENTRED) and not name.endswith("linear_attn.norm.weight")
            parameter.normal_(1.0 if is_scale and not is_centred else 0.0, 0.25)
            if name.endswith("A_log"):
                parameter.normal_(-2.0, 1.0)  # some states last for several chunks, others do not
            elif name.endswith("conv1d.weight"):
                parameter.normal_(0.0, 1.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.25)
            elif name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.25)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return model


def reference_activations(model, tokens: np.ndarray) -> dict[ActivationKey, np.ndarray]:
    """Every site of every layer for token rows [B, T] without padding."""
    found: dict[ActivationKey, np.ndarray] = {}

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

    def hook_heads(layer: int, module):
        """Records TransformerLens' `hook_result`: each head's z times its slice of the output projection."""

        def outputs(module, inputs) -> None:
            inputs_first = transformers.pytorch_utils.Conv1D
            weight = module.weight.T if isinstance(module, inputs_first) else module.weight
            num_heads = model.config.num_attention_heads
            z, slices = inputs[0].unflatten(-1, (num_heads, -1)), weight.unflatten(1, (num_heads, -1))
            keep(layer, Site.head_out, torch.stack([z[..., n, :] @ slices[:, n].T for n in range(num_heads)], dim=-2))

        return module.register_forward_pre_hook(outputs)

    def attention(module, query, key, value, mask, **options):
        """Calls the model's own eager attention and records its arguments, which have the shape [B, heads, T, H]."""
        z, weights = sys.modules[type(module).__module__].eager_attention_forward(
            module, query, key, value, mask, **options
        )
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

    transformers.AttentionInterface.register("looked_at", attention)
    transformers.AttentionMaskInterface.register("looked_at", transformers.masking_utils.eager_mask)
    model.set_attn_implementation("looked_at")
    handles = []
    for site, places in PLACES[model.config.model_type].items():
        for place in (places,) if isinstance(places, str) else places:
            name, *side = place.split()
            for layer in range(model.config.num_hidden_layers) if site.per_layer else (-1,):
                with suppress(AttributeError):
                    module = model.base_model.get_submodule(name.replace("*", str(layer)))
                    handles.append(hook(site, layer, module, *side))
    for name, module in model.base_model.named_modules():
        layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if name.endswith(".experts"):
            handles.append(hook_experts(layer, module))
        if name.endswith(OUTPUT_PROJECTIONS):
            handles.append(hook_heads(layer, module))
    with torch.no_grad():
        model(torch.from_numpy(tokens.astype(np.int64)))
    for handle in handles:
        handle.remove()
    model.set_attn_implementation("eager")  # does not record anything
    if model.config.model_type.startswith("deepseek"):
        sort_experts(found)
    return found


def sort_experts(found: dict[ActivationKey, np.ndarray]) -> None:
    """Sorts each token's experts by weight, since DeepSeek's router returns them in no particular order."""
    for key, weights in list(found.items()):
        if key.site is Site.router_weights:
            order = np.argsort(-weights, axis=-1, kind="stable")
            for site in (Site.router_weights, Site.router_indices, Site.expert_out):
                chosen = found[ActivationKey(key.layer, site)]
                by_expert = chosen.reshape(*weights.shape, -1)
                chosen[...] = np.take_along_axis(by_expert, order[..., None], axis=2).reshape(chosen.shape)
