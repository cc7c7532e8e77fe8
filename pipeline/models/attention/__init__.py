"""The implementations of attention, and which of them a step uses."""
