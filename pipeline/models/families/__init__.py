"""One module per family: from its config.json to an architecture and its tensors' names."""
