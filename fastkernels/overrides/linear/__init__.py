"""Linear layers: BLAS-sized, skinny and FP8 kernels, and the parallel linear modules."""
