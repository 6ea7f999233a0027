"""The quality tier: whether outputs stay right when a set's kernels run in a host, as a number in [0, 1].

`calibration.py` is the arithmetic, `metrics/` has one metric a file, `measure.py` runs an item.
"""
