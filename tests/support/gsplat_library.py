"""gsplat in a folder of its own, in the cache: only its tests need it.

`PYTHONPATH=tests python tests/support/gsplat_library.py` prints the folder, for PYTHONPATH.
"""

from __future__ import annotations

from pathlib import Path

from support.fla_library import installed

PACKAGES = ("gsplat==1.5.3", "nerfacc==0.5.3", "ninja==1.13.0", "jaxtyping==0.3.3", "wadler-lindig==0.1.7")


def library_path() -> Path:
    """The folder of the packages, without their dependencies; installs them first if they are not in the cache."""
    return installed("gsplat-1.5.3", PACKAGES)


if __name__ == "__main__":
    print(library_path())
