"""The plan of a run: every shape, count and byte. Pure arithmetic on what was opened, before anything is computed on a
device. Imports `step` and below."""
