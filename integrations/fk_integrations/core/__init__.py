"""The base of a patch: the adapter of a host, the journal, ranks, reports, versions of hosts."""
