"""The groups of generated documents in a store, and what was captured while decoding."""
