"""Requests, the batch of each step, and outputs."""
