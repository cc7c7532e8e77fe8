"""A job: what it opens, what identifies it, and how its progress is measured and watched. Imports `planning` and
everything below."""
