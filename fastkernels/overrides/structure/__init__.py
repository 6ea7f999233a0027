"""Layers of structure prediction, by the algorithms of AlphaFold 3 (Abramson et al., Nature 2024, supplement)."""
