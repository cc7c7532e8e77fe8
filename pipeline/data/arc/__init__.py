"""ARC-AGI tasks as documents."""
