"""Mixtures of experts: routers, the sort by expert, the experts' products and sums, and Mixtral's block."""
