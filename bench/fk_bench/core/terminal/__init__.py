"""A command on a terminal: flags and their panels, tables, progress, errors of one line, and signals."""
