"""Writes stores: blocks, claims on streams, completion and deletion."""
