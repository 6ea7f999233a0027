"""OpenAI's Responses API, without storage: a request is a chat completion in other words."""
