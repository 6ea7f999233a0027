"""Models of flash-linear-attention: their norms, and the functions that their recurrent layers call."""
