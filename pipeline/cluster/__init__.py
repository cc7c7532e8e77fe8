"""The processes and devices of a run: joining, agreement, preemption, and the mesh. Imports `core` and `config`."""
