"""Anthropic's Messages API: a request is a chat completion in other words."""
