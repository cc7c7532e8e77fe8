"""Verifies a store."""
