"""The models: forward pass, families, checkpoints, and how weights are sharded. Imports `core` only."""
