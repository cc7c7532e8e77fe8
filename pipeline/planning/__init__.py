"""The plan of a run: every shape, count and byte, worked out before anything is opened. Imports `step` and below."""
