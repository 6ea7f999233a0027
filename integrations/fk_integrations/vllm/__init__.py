"""vLLM as a host."""
