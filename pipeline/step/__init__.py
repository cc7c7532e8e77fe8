"""The compiled step: from token rows to activations as they are stored, with their statistics. Imports `cluster`,
`models` and the store's format."""
