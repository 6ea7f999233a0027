"""diffusers as a host."""
