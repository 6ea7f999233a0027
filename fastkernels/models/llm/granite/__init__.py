"""IBM's Granite models."""
