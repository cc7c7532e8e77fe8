"""Checkpoints in the safetensors format: their files, headers, and reading their tensors onto devices."""
