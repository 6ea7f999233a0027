"""From an op to result rows: the run, the two processes of an op, one case."""
