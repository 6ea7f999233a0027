"""Runs in MLflow: metrics, sources and lineage of candidates, from rows alone.

store writes and reads; command has `fk-bench track`. Other commands log themselves with --track.
"""
