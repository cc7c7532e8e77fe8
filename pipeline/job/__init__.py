"""A job: opens it, identifies it, and measures and watches its progress. Imports `planning` and lower packages."""
