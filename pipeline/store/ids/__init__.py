"""Documents by id: the index of a stream's ids, and what finds a document's blocks in it.

Above the format's room, below those that read, write and check a store.
"""
