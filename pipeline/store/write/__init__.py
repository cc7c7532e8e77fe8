"""Writes a store: blocks, claims, completing, merging and deleting."""
