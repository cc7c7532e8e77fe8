"""PEFT adapters, written without PEFT."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

ADAPTER = "adapter_model.safetensors"


def write_adapter(path: Path, tensors: dict[str, np.ndarray], **settings: object) -> str:
    """Writes an adapter with these tensors, which are named as in the base model. Returns its address."""
    path.mkdir(exist_ok=True)
    save_file({f"base_model.model.{name}": np.ascontiguousarray(t) for name, t in tensors.items()}, path / ADAPTER)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "owner/Base"} | settings
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)
