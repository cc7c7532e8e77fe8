"""From documents to blocks of token rows: sources, tokenizers, streams, packing, selection. Only imports `core` and
`config`, and neither JAX nor Hydra."""
