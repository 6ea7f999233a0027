"""Recurrences over packed tokens with a state in a slot for each sequence: scans, delta rules, linear attention, LSTM.

References share `packed.py`, declarations `cases.py`; `batches.py` and `pools.py` have the two forms of hosts' states.
"""
