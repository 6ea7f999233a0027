"""`fk-bench coverage`: which architectures of the installed transformers our ops can compute."""
