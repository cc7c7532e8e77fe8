"""The model writes documents: decoding, sampling, and groups of completions in the store. Imports `job` and below."""
