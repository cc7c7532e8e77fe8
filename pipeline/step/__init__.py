"""The compiled step: token rows in, activations in their stored dtype and their statistics out. Imports `cluster`,
`models` and the store's format."""
