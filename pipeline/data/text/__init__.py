"""From text to token ids: tokenizers and templates."""
