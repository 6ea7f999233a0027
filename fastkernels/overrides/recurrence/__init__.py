"""Recurrences over packed tokens with a state in a slot for each sequence: scans, delta rules, linear attention.

`packed.py` has what the references share, `cases.py` the common part of the declarations. Also torch's LSTM.
"""
