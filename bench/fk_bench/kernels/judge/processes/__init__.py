"""The processes that run candidate and baseline: starting them, caging them, talking to them."""
