"""`fk-bench serve`, `serve-compare`, `diff` and `report`: real servers measured by a client."""
