"""A host's offline engine in a process of its own, and its random weights."""
