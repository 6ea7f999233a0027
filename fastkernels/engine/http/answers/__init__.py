"""Answers, streams, and metrics of both."""
