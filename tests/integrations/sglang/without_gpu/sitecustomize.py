"""Loads the stand-ins for a GPU in every Python process with this folder in PYTHONPATH."""

import sys

if not any("resource_tracker" in word for word in sys.orig_argv):  # multiprocessing's, which needs no torch
    import stand_ins  # noqa: F401
