"""Triton kernels that the recurrences share: chunks with products of matrices, and steps."""
