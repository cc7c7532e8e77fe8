"""The groups of generated documents in a store, and activations captured during decoding."""
