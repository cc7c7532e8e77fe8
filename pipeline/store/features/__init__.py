"""Features of SAEs by feature: the index of a block, its statistics, and what reads them.

Above the format's room, below those that read, write and check a store.
"""
