"""Model architectures built from the overrides, one a file."""
