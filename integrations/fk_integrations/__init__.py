"""Host integrations of FastKernels: one host a folder. Importing this package imports no host and no torch."""
