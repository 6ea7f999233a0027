"""Routing for mixtures of experts: the choice of experts, the sort of pairs by expert, and the sum over experts."""
