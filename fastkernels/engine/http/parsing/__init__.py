"""Parse the text of an answer as it arrives: reasoning, content and tool calls."""
