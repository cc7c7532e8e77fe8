"""Writes stores: blocks, claims on streams, completion, merging and deletion."""
