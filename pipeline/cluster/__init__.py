"""The processes and devices of a run: startup, joining, agreement, preemption, mesh. Imports `core` and `config`."""
