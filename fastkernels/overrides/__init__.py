"""One op a file: l1 primitives, l2 fused ops and modules, l3 layers. Found by file name (fastkernels.core.registry)."""
