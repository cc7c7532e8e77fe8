"""From text to token ids: tokenizers, chat templates and the sandbox that renders them."""
