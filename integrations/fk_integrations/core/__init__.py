"""The patcher: adapters, seams, apply, choices, proof and reports; signatures and versions of hosts.

One room, because a patch and its undo run through all of it.
"""
