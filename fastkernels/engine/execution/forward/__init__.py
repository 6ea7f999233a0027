"""Forward passes on one rank: graphs, weights, memory, and features that they keep."""
