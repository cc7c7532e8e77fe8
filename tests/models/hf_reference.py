"""Tiny random Hugging Face models, saved as checkpoints, and what forward hooks see in them."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.sites import ActivationKey, Site

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
}


def save_random(family: str, path: Path, *, seed: int = 0, max_shard_size: str = "1GB", **overrides: object):
    """A random float32 model of `family` ("qwen2" or "llama"), saved to `path`. Returns the torch model."""
    config_class, model_class = {
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**SIZES | overrides)).eval()
    with torch.no_grad():  # the usual initialisation leaves biases at 0, norms at 1 and attention almost uniform
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.25)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return model


def reference_activations(model, tokens: np.ndarray) -> dict[ActivationKey, np.ndarray]:
    """Every site of every layer for token rows [B, T] without padding, by forward hooks."""
    found: dict[ActivationKey, np.ndarray] = {}

    def keep(layer: int, site: Site, value) -> None:
        value = value[0] if isinstance(value, tuple) else value
        found[ActivationKey(layer, site)] = value.detach().float().numpy().copy()

    def on_output(module, layer: int, site: Site) -> None:
        handles.append(module.register_forward_hook(lambda _m, _i, output: keep(layer, site, output)))

    def on_input(module, layer: int, site: Site) -> None:
        handles.append(module.register_forward_pre_hook(lambda _m, inputs: keep(layer, site, inputs[0])))

    handles: list = []
    on_output(model.model.embed_tokens, -1, Site.embed)
    on_output(model.model.norm, -1, Site.final_norm)
    for number, layer in enumerate(model.model.layers):
        on_input(layer, number, Site.resid_pre)
        on_output(layer.self_attn, number, Site.attn_out)
        on_input(layer.post_attention_layernorm, number, Site.resid_mid)
        on_output(layer.mlp, number, Site.mlp_out)
        on_output(layer, number, Site.resid_post)
    with torch.no_grad():
        model(torch.from_numpy(tokens.astype(np.int64)))
    for handle in handles:
        handle.remove()
    return found
