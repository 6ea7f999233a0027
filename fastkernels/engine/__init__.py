"""The engine: continuous batching over a paged KV cache, offline (LLM), asynchronous (AsyncLLM) and as a server."""
