"""Of the flushers that stand still while they are replaced: before a file's name, a manifest, a removal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.freezing import FreezeCell, play_freeze
from tests.support.s3_place import S3Place


@pytest.mark.parametrize("number", [1, 2, 10])
def test_on_a_directory(number: int, tmp_path: Path) -> None:
    play_freeze(FreezeCell("directory", number), str(tmp_path / "store" / "run"), tmp_path)


@pytest.mark.s3
def test_on_s3(swift_s3: S3Place, tmp_path: Path) -> None:
    play_freeze(FreezeCell("s3", 4), swift_s3.url(), tmp_path)
