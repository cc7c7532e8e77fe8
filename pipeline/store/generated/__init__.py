"""The groups of generated documents that a store keeps until they are in its blocks."""
