"""One module per family: from its config.json to an architecture and the names of its tensors."""
