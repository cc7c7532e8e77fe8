"""Plans for a TPU slice, without one: compiles the step for it, and works out limits, time and cost."""
