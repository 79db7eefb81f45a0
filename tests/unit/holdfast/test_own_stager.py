"""The note of a stager that a job has started itself, and that stager's messages to rank 0."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from holdfast import own_stager
from holdfast.errors import ConfigError, FencedError
from holdfast.image.shares import ShareNumber
from holdfast.net.address import Address
from holdfast.own_stager import OwnStagerEndpoint, OwnStagerNote, find_own_stager, note_path, parse_first_line

RUN, OTHER = "/mnt/run", "/mnt/other"
HERE = Address("127.0.0.1", 29411)
KEY = b"k" * 32


def test_the_next_start_finds_it_while_it_lives_and_not_afterwards(tmp_path: Path) -> None:
    assert find_own_stager(RUN, tmp_path) is None
    note = OwnStagerNote(RUN, tmp_path, HERE, KEY)
    assert find_own_stager(RUN, tmp_path) == OwnStagerEndpoint("127.0.0.1:29411", KEY.decode())
    assert find_own_stager("file:///mnt/run/", tmp_path) is not None, "another spelling of the same store"
    assert find_own_stager(OTHER, tmp_path) is None
    assert stat.S_IMODE(note_path(RUN, tmp_path).stat().st_mode) == 0o600
    note.close()
    note.close()
    assert find_own_stager(RUN, tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_the_note_tells_the_share(tmp_path: Path) -> None:
    note = OwnStagerNote(RUN, tmp_path, HERE, KEY, ShareNumber(1, 3))
    found = find_own_stager(RUN, tmp_path)
    assert found is not None
    assert found.share == "2/3"
    note.close()


def test_a_stager_of_an_older_version_whose_note_has_no_share_is_found(tmp_path: Path) -> None:
    note = OwnStagerNote(RUN, tmp_path, HERE, KEY)
    note_path(RUN, tmp_path).write_text(f'{{"address": "{HERE}", "key": "{KEY.decode()}"}}')
    assert find_own_stager(RUN, tmp_path) == OwnStagerEndpoint(str(HERE), KEY.decode(), "1/1")
    note.close()


def test_the_note_of_a_killed_one_says_nothing_and_the_next_one_writes_over_it(tmp_path: Path) -> None:
    dead = OwnStagerNote(RUN, tmp_path, HERE, KEY)
    os.close(dead._fd)  # as the kernel does
    assert note_path(RUN, tmp_path).exists()
    assert find_own_stager(RUN, tmp_path) is None
    OwnStagerNote(RUN, tmp_path, Address("node-0", 1), KEY)
    found = find_own_stager(RUN, tmp_path)
    assert found is not None
    assert found.address == "node-0:1"


def test_two_of_one_run_on_one_machine_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_stager, "_HELD_SECONDS_MAX", 0.1)  # the other one does not end
    note = OwnStagerNote(RUN, tmp_path, HERE, KEY)
    OwnStagerNote(OTHER, tmp_path, HERE, KEY).close()
    with pytest.raises(ConfigError, match="each run has one job at a time"):
        OwnStagerNote(RUN, tmp_path, HERE, KEY)
    note.close()
    OwnStagerNote(RUN, tmp_path, HERE, KEY).close()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"address": "x"}', '{"address": 7, "key": "x"}'])
def test_a_note_that_is_no_note_says_nothing(tmp_path: Path, text: str) -> None:
    OwnStagerNote(RUN, tmp_path, HERE, KEY)
    note_path(RUN, tmp_path).write_text(text)
    assert find_own_stager(RUN, tmp_path) is None


def test_rank_0_hears_where_it_listens_or_its_own_error() -> None:
    assert parse_first_line(OwnStagerEndpoint("127.0.0.1:7", "").to_bytes()) == ("127.0.0.1:7", "", "1/1")
    with pytest.raises(FencedError, match="another writes"):
        parse_first_line(b'{"error": ["fenced", "another writes"]}\n')
    for line in (b"", b"Traceback", b"7", b'{"error": 7}'):
        with pytest.raises(ValueError, match="expected the address"):
            parse_first_line(line)
