"""The key that a stager makes for ranks of its user on its machine."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from holdfast import stager_key
from holdfast.errors import ConfigError
from holdfast.net.address import Address
from holdfast.net.key import KEY_CHARACTERS_MIN
from holdfast.stager_key import StagerKey, read_stager_key

HERE, THERE = Address("127.0.0.1", 29411), Address("127.0.0.1", 29412)


@pytest.fixture(autouse=True, name="directory")
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(stager_key, "default_runtime_dir", lambda: tmp_path / "base" / "own")
    return tmp_path / "base" / "own"


def test_a_rank_of_this_user_finds_it_and_nobody_else_may(directory: Path) -> None:
    made = StagerKey(HERE)
    assert len(made.key) >= KEY_CHARACTERS_MIN
    assert read_stager_key(HERE) == read_stager_key(Address("localhost", 29411)) == made.key
    (path,) = directory.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert StagerKey(THERE).key != made.key
    made.close()
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:29411 and this rank need the same key"):
        read_stager_key(HERE)


def test_a_killed_stagers_key_is_replaced_and_survives_the_old_ones_close() -> None:
    frozen = StagerKey(HERE)
    second = StagerKey(HERE)
    assert read_stager_key(HERE) == second.key != frozen.key
    frozen.close()
    assert read_stager_key(HERE) == second.key


def test_a_place_that_others_may_write_into_is_refused(directory: Path) -> None:
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    with pytest.raises(ConfigError, match="mode 0777"):
        StagerKey(HERE)


def test_a_link_that_somebody_has_put_there_is_not_followed(directory: Path, tmp_path: Path) -> None:
    directory.mkdir(parents=True, mode=0o700)
    (tmp_path / "theirs").write_text("x" * KEY_CHARACTERS_MIN)
    (directory / "stager-29411.key").symlink_to(tmp_path / "theirs")
    with pytest.raises(ConfigError):
        read_stager_key(HERE)
    StagerKey(HERE)
    assert (tmp_path / "theirs").read_text() == "x" * KEY_CHARACTERS_MIN
