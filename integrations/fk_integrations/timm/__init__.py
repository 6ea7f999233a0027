"""timm as a host."""
