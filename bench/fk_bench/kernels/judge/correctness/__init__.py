"""The cases of an op and the comparison of outputs with a float64 oracle."""
