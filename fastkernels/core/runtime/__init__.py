"""What a process finds out while it runs: faster code for a shape, and whether a user's code works in time."""
