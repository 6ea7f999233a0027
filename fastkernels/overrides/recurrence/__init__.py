"""Recurrences over packed tokens with a state in a slot for each sequence: scans, delta rules, linear attention.

`packed.py` has what the references share, `cases.py` the common part of the declarations. `batches.py` and `pools.py`
have the two forms in which hosts hold states. Also torch's LSTM.
"""
