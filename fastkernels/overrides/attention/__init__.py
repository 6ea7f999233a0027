"""Attention over a paged KV cache: prefill, decode, the merge of partial results, and the layer."""
