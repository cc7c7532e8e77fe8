"""Fills a store: the loop, copies to the host, the writer thread, leased streams."""
