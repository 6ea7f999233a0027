"""The processes that run candidate and baseline: starting them, talking to them. The folder cage restricts them."""
