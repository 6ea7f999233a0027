"""openfold3 in a folder of its own, in the cache: only its tests need it.

`PYTHONPATH=tests python tests/support/openfold3_library.py` prints the folder, for PYTHONPATH.
"""

from __future__ import annotations

from pathlib import Path

from support.fla_library import installed

PACKAGES = (
    "openfold3==0.5.0",
    "ml-collections==1.1.0",
    "biotite==1.6.0",
    "gemmi==0.7.5",
    "absl-py==2.5.1",
    "scipy==1.17.1",
    # for its random features
    "lmdb==3.0.0",
    "memory-profiler==0.61.0",
    "pandas==3.1.1",
    "pdbeccdutils==2.0.1",
    "rdkit==2026.9.1",
)


def library_path() -> Path:
    """The folder of the packages, without their dependencies; installs them first if they are not in the cache."""
    return installed("openfold3-0.5.0-features", PACKAGES)


if __name__ == "__main__":
    print(library_path())
