"""Indexes that repeat what a store contains: SAE features by feature, and documents by id.

Above `format`, and below the packages that read, write and check a store.
"""
