"""Models, one architecture a file, in a folder for each category."""
