"""Reading a store: rows, documents, shuffled batches, and exports to other formats."""
