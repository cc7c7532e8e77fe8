"""A job that is ready to run: what it opens, what identifies it, its metrics and watchdog. Imports `planning` and
below."""
