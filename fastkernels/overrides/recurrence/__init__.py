"""Recurrences over tokens with a matrix of state for each head: gated delta rule, Mamba 2, linear attention."""
