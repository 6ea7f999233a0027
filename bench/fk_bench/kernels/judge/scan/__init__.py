"""The static scan of a candidate file, which runs before any of its code."""
