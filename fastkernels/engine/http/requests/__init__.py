"""Bodies of requests, and the prompts and media in them."""
