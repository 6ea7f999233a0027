"""`fk-bench profile`: an op's kernels, a model's step or a judged run as an author acts on it.

Each tool (torch's profiler, ncu, nsys) gives a `Profile`; `judged` has what the judge measured itself.
"""
