"""Writes stores: blocks, leases on streams, completion and deletion."""
