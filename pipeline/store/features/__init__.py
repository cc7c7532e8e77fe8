"""SAE features by feature: a block's index and statistics, and reading them.

Above `format`, and below the packages that read, write and check a store.
"""
