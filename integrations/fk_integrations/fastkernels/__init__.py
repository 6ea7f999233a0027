"""Our own engine as a host."""
