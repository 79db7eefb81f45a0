"""Skips these tests without the late runtime, each with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.late.control import is_late

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if is_late():
        # They make captures fail, and up to torch 2.11 the process's generator and allocator do not recover.
        items.sort(key=lambda item: item.path == _HERE / "test_graphs.py")
        return
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(
                pytest.mark.skip(reason="runs on the late runtime: python -m tests.late tests/late")
            )
