"""The objects of a store, local or remote: reading, writing, listing, digests."""
