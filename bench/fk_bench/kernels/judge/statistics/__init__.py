"""Statistics over several independent process starts."""
