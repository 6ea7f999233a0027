"""Expert parallelism: tokens sent to the ranks of their experts, and results sent back. Parts are in collective."""
