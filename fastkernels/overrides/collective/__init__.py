"""Collectives: ops whose result depends on the tensors of all ranks of a group."""
