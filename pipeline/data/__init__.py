"""From documents to token blocks: sources, streams, packing, selection. Imports `core` and `config`; neither JAX nor
Hydra."""
