"""Folders of the source checkout, which an installation from a wheel does not have."""

from __future__ import annotations

from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[3]


def checkout_path(relative: str) -> Path:
    """An existing file or folder of the checkout. Raises FileNotFoundError where there is none, as in a wheel."""
    path = REPO_ROOT / relative
    if not path.exists():
        raise FileNotFoundError(
            f"there is no {path}: {relative} is in a checkout of FastKernels, not in its package"
        )
    return path
