"""Planning for a TPU slice that is not there: the step is compiled for it, its limits and costs are worked out."""
