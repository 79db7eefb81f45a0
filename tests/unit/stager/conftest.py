"""Fixtures with the bench for tests of a stager's parts together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.stager.bench import Bench


@pytest.fixture
def empty_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Provide a bench before any rank has joined."""
    bench = Bench(tmp_path, monkeypatch)
    yield bench
    bench.close()


@pytest.fixture
def bench(empty_bench: Bench) -> Bench:
    """Provide a bench whose ranks both have their WELCOME."""
    empty_bench.welcome_all()
    return empty_bench
