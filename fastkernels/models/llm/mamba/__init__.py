"""Models of state space layers: Mamba and Mamba-2."""
