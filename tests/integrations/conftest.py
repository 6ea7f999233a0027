"""The checks in vllm/ and sglang/ run in those hosts' environments, started by test_engines.py."""

collect_ignore = ["vllm", "sglang"]
