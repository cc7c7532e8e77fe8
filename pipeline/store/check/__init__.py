"""Whether a store is sound."""
