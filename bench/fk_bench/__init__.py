"""The `fk-bench` command: measures kernels alone, in whole models and in serving hosts."""
