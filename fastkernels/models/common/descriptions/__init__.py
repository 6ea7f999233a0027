"""Models as data: descriptions, the architectures by name, and activations."""
