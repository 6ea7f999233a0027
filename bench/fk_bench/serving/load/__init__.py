"""Generates load: prompts, arrival times, the client that sends them, and what the servers count meanwhile."""
