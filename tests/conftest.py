"""The real hosts first: they take longest, and two workers share the tests file by file."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "tests/hosts/" not in item.nodeid)
