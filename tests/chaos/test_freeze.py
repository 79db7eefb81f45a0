"""Flushers that stand still while they are replaced (tests/chaos/freezing.py), but for those of tests/chaos/regular."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.freezing import ACTS, FreezeCell, play_freeze
from tests.support.s3_place import S3Place


@pytest.mark.parametrize("number", range(1, ACTS + 1))
def test_on_a_directory(number: int, tmp_path: Path) -> None:
    play_freeze(FreezeCell("directory", number), str(tmp_path / "store" / "run"), tmp_path)


@pytest.mark.s3
@pytest.mark.parametrize("number", range(1, ACTS + 1))
def test_on_s3(number: int, swift_s3: S3Place, tmp_path: Path) -> None:
    play_freeze(FreezeCell("s3", number), swift_s3.url(), tmp_path)
