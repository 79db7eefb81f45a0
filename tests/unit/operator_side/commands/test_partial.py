"""`holdfast pull` resumes its own file, and writes through no link or file of another user."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from holdfast.errors import StoreError
from operator_side.commands.partial import partial

NAME = ".step.pt.0000002a-10.part"


def fetch(path: Path, data: bytes = b"0123456789") -> bytes:
    """As a pull; gives what an earlier call had left."""
    with partial(path, 42, 10) as fd:
        before = os.pread(fd, 100, 0)
        os.pwrite(fd, data, 0)
    return before


def test_bytes_fetched_before_an_interruption_are_kept(tmp_path: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt), partial(tmp_path / "step.pt", 42, 10) as fd:
        os.write(fd, b"01234")
        raise KeyboardInterrupt
    assert (tmp_path / NAME).read_bytes() == b"01234"
    assert fetch(tmp_path / "step.pt") == b"01234"
    assert [path.name for path in tmp_path.iterdir()] == ["step.pt"]


@pytest.mark.parametrize("kind", ["link", "dangling link", "second name", "pipe", "directory"])
def test_a_file_planted_at_the_name_is_neither_written_nor_removed(tmp_path: Path, kind: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    place = tmp_path / "fetched"
    place.mkdir()
    planted = place / NAME
    match kind:
        case "link":
            planted.symlink_to(precious)
        case "dangling link":
            planted.symlink_to(tmp_path / "new")
        case "second name":
            planted.hardlink_to(precious)
        case "pipe":
            os.mkfifo(planted)
        case _:
            planted.mkdir()
    with pytest.raises((StoreError, IsADirectoryError), match=r"\.part"):
        fetch(place / "step.pt")
    assert precious.read_text() == "precious"
    assert os.path.lexists(planted)
    assert not (tmp_path / "new").exists()
    assert not (place / "step.pt").exists()


def test_files_planted_beside_the_name_are_not_written_through(tmp_path: Path) -> None:
    """Left-overs of fetches of other checkpoints are opened, to see whether anybody goes on with them."""
    place = tmp_path / "fetched"
    place.mkdir()
    (place / ".step.pt.00000001-5.part").symlink_to(tmp_path / "new")
    (place / ".step.pt.00000002-5.part").write_bytes(b"old")
    fetch(place / "step.pt")
    assert not (tmp_path / "new").exists()
    assert sorted(path.name for path in place.iterdir()) == [".step.pt.00000001-5.part", "step.pt"]


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).write_bytes(b"theirs")
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(StoreError, match="regular file of uid"):
        fetch(tmp_path / "step.pt")
    assert (tmp_path / NAME).read_bytes() == b"theirs"
