"""The paged KV cache: blocks, prefix caching and memory limits."""
