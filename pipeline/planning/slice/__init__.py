"""Planning for a TPU slice without having one: compiles the step for it, and estimates limits, time and cost."""
