#!/usr/bin/env python3
"""Write the tasks of all architectures into bench/fk_bench/info/targets.tsv, from the registry: a minute or two.

Run it after a change of a model's blocks; a test compares the file with the registry. Other rows are written by hand.
"""

from __future__ import annotations

from fk_bench.info.targets import FILE, renewed, targets, write

if __name__ == "__main__":
    write(renewed(targets()))
    print(FILE)
