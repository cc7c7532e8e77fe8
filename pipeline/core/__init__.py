"""Errors and exit codes, addresses, the Hub, names of activations. Every package uses it; it imports none of them."""
