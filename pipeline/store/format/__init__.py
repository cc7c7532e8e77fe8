"""The parts of a store and their encodings: layout, metadata, commit records, tables, statistics."""
