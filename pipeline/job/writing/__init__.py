"""The writer thread: copies from the devices, and blocks that are written and committed."""
