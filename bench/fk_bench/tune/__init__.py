"""`fk-bench tune`: measures every provider of an op and writes the table that dispatch reads."""
