"""Policies of robots: observations in, a chunk of actions out."""
