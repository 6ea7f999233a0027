"""transformers as a host."""
