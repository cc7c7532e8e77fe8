"""Documents by id: the index of a store's ids, and finding a document's blocks in it.

Above `format`, and below the packages that read, write and check a store.
"""
