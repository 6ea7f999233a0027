"""Mixtures of experts: the experts' products in each format, and Mixtral's block."""
