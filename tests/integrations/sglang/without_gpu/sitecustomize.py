"""Run by every Python process that has this folder in PYTHONPATH: an engine's get the stand-ins for a GPU."""

import sys

if not any("resource_tracker" in word for word in sys.orig_argv):  # multiprocessing's, which needs no torch
    import stand_ins  # noqa: F401
