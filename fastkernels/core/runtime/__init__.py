"""Measurements and trials in a running process: faster code for a shape, and whether a user's code works in time."""
