"""The engine: continuous batching over a paged KV cache, offline (LLM), asynchronous (AsyncLLM) and as a server.

A request passes through http/, scheduling/, cache/, execution/ and sampling/, in this order.
"""
