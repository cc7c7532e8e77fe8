"""Verifying a store."""
