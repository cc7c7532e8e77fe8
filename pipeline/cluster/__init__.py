"""The processes and devices of a run: joining, agreeing, being preempted, and the mesh. Imports `core` and `config`."""
