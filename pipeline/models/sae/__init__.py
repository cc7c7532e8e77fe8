"""Trained sparse autoencoders and transcoders: what they compute, and reading their checkpoints."""
