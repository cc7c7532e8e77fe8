"""The implementations of attention, and the choice between them."""
