"""Reading a store: documents, rows, shuffled batches, and copies in other formats."""
