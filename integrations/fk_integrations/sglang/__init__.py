"""SGLang as a host."""
