"""Checkpoints in the safetensors format: files, headers, and reading tensors onto devices."""
