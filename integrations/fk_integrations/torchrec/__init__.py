"""Models of torchrec: their collections of embedding bags, and cross networks."""
