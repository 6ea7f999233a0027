"""Choices that are verified where they run: proposals timed against the production kernel on the user's own chip."""
