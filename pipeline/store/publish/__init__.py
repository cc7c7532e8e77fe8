"""Uploading a finished store to the Hugging Face Hub."""
