"""Filling a store: the loop, copies to the host, the writer thread, claimed streams. The topmost room; only commands
import it."""
