"""The library's door for notebooks: `pipeline.Extractor`."""
