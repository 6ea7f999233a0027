"""Our pass of vLLM's compiler: what it replaces in the graph of a compiled model, a kind of node a file."""
