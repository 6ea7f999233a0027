"""Candidates that were written for other benchmarks and libraries, as candidates for our ops.

A layout is a module with `recognizes(folder)`, `adapted(folder)` and `bind(folder, op, ...)`. The first two read files
without running them; `bind` runs in the candidate's process and returns the op's function.
"""
