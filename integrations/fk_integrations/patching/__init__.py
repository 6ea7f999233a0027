"""A patch of a loaded model: pair ops with modules, put ours in through seams, make the rows, prove and undo."""
