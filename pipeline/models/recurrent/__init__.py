"""What takes the place of attention: blocks whose positions continue from a state of earlier ones."""
