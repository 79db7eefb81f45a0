"""Nightly, more of tests/integration/test_tier_kills.py: the other kinds of tiers."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.faultpoint import Point
from tests.integration.test_tier_kills import POINTS, check_kills


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("kind", ["pm", "pm-libpmem", "file"])
def test_a_kill_leaves_what_was_complete(
    kind: str, point: Point, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_kills(kind, point, tmp_path, monkeypatch)
