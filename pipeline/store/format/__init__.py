"""What a store consists of: layout, metadata, commit records, tables, statistics. Reads and writes them one by one."""
