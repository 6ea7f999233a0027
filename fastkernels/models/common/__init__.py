"""What model files share: the registry, config reading, building and weights. It names no model."""
