"""Write an op's host classes as one self-contained file for a fork: `exporter.py` assembles it, `source.py` reads ours.

`plain/` holds short versions of core modules that an exported file contains in their place.
"""
