"""The parts of a store: layout, metadata, commit records, tables, statistics; reads and writes each of them."""
