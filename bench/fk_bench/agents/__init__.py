"""Agents that write kernels: `fk-bench agent-loop` runs a command on task folders, `fk-bench mcp` serves them.

A session judges attempts and keeps their history; loop and server only carry sources to it and feedback back.
"""
