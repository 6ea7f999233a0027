"""`fk-bench eval`: how much of a set's speedup survives in whole models and in real hosts.

A suite declares items. Each is measured with and without the set of candidates; MacroEval makes one score of them.
"""
