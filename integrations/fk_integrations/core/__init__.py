"""The patcher: adapters, seams, apply, proof and reports; signatures and versions of hosts."""
