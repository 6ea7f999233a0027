"""The real hosts first: they take longest, and two workers share the tests file by file. One thread for each process:
threads of two workers that wait for each other on two cores take ten times as long.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "tests/hosts/" not in item.nodeid)
