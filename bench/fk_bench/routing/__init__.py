"""`fk-bench routing`: captured expert routing compared with uniform random routing."""
