"""Exchanges between the devices of a mesh, inside `shard_map`."""
