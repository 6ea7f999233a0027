"""Language models. Models of a series share a folder."""
