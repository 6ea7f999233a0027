"""Models of openfold3: attention with pair bias, triangle updates, transitions, outer products."""
