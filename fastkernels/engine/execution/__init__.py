"""Running steps on the device: runners, ranks, CUDA graphs and attention backends."""
