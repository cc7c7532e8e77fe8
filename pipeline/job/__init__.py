"""A job that is about to run: what it opens, what identifies it, and how its progress is watched. Imports `planning`
and everything below."""
