"""The supervisor's notes for the flusher are read completely, and damage in them loses at most one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.ring.ring import Ring
from holdfast.ring.ring_keeper import SET_ASIDE_NAME, read_set_aside, record_set_aside


def test_each_is_read_in_its_order_and_a_line_that_is_not_ended_is_not(tmp_path: Path) -> None:
    assert read_set_aside(tmp_path) == []
    for key in (CheckpointId(3, 1200), CheckpointId(1, 5)):
        record_set_aside(tmp_path, key)
    with (tmp_path / SET_ASIDE_NAME).open("a") as file:
        file.write("nonsense\n\n7-a12")
    assert read_set_aside(tmp_path) == [CheckpointId(3, 1200), CheckpointId(1, 5)]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("5-a1\n")
    (tmp_path / SET_ASIDE_NAME).symlink_to(tmp_path / "theirs")
    assert read_set_aside(tmp_path) == []
    with pytest.raises(ConfigError, match="remove it"):
        record_set_aside(tmp_path, CheckpointId(1, 6))
    assert (tmp_path / "theirs").read_text() == "5-a1\n"


def test_the_set_aside_file_goes_with_the_ring(tmp_path: Path) -> None:
    record_set_aside(tmp_path, CheckpointId(1, 5))
    Ring.remove(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text", ["", "5", "5-a0", "-5-a1", "5-a", "a1", "5-a1 ", "5-a1-a2", "٥-a1", "9" * 19 + "-a1"]
)
def test_a_bad_checkpoint_label_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 1200-a3"):
        CheckpointId.from_label(text)


def test_a_name_is_read_back_also_with_the_zeros_of_a_files_name() -> None:
    assert (
        CheckpointId.from_label(CheckpointId(12, 5).label)
        == CheckpointId(12, 5)
        == CheckpointId.from_label("000000005-a012")
    )
