"""ultralytics in a folder of its own, in the cache: only its tests need it, and its licence is the AGPL.

`PYTHONPATH=tests python tests/support/ultralytics_library.py` prints the folder, for PYTHONPATH.
"""

from __future__ import annotations

from pathlib import Path

from support.fla_library import installed

PACKAGES = (
    "ultralytics==8.4.190",
    "opencv-python-headless==5.0.0.93",
    "matplotlib==3.11.2",
    "cycler==0.12.1",
)


def library_path() -> Path:
    """The folder of the packages, with what importing a model needs; installs them first if not in the cache."""
    return installed("ultralytics-8.4.190", PACKAGES)


if __name__ == "__main__":
    print(library_path())
