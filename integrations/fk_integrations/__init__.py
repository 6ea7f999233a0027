"""Host integrations of FastKernels: one host a file. Importing this package imports no host and no torch."""
