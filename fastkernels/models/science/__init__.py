"""Models of science: structures of proteins."""
