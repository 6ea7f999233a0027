"""Candidates that were written for other benchmarks and libraries, as candidates for our ops: one layout a module.

`recognizes` and `adapted` read files without running them; `bind` runs in the candidate's process."""
