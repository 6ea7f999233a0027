"""`fk-bench kernels`: a candidate against production, case by case. judge/ does the measuring."""
