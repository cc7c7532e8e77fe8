"""The models: their parts, what is loaded for a capture, and how it is divided over devices. Imports `core` alone."""
