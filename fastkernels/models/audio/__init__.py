"""Models that read speech."""
