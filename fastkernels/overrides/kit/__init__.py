"""Code that kernels of several families share: launches, row layouts, number formats, random numbers, libraries."""
