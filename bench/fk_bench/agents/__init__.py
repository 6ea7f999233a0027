"""Agents that write kernels: sessions judge attempts, a loop runs a command on task folders, a server speaks MCP."""
