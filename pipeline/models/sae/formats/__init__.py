"""The formats of SAE checkpoints: one module for each."""
