"""Kernels of the products: CUDA C++ for Hopper's tensor cores, and Triton."""
