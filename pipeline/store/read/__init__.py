"""Reads a store: rows, documents, shuffled batches, and copies in other formats."""
