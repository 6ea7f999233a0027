"""Timed batches of both sides: requests, fresh inputs, calls alone, and the checks of timed calls."""
