"""Point clouds on a grid: orders along space-filling curves, sparse convolution, and reductions of segments."""
