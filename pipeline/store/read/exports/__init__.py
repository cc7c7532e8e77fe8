"""Copies of a store in the formats of other libraries."""
