from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.net.key import KEY_CHARACTERS_MIN, new_key, read_key

GOOD = "k" * KEY_CHARACTERS_MIN


def _file(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_new_key_is_good_and_never_the_same(tmp_path: Path) -> None:
    first, second = new_key(), new_key()
    assert first != second
    assert read_key(first, None) == first.encode()
    assert read_key(None, _file(tmp_path / "key", f"{first}\n".encode())) == first.encode()


def test_no_key_is_empty() -> None:
    assert read_key(None, None) == b""


def test_a_bad_key_is_explained_and_never_shown(tmp_path: Path) -> None:
    bad = {
        "both set": (GOOD, tmp_path / "key"),
        "has 5 characters": ("secre", None),
        "No such file": (None, tmp_path / "missing"),
        "every user": (None, _file(tmp_path / "open", GOOD.encode(), 0o644)),
        "more than 4096": (None, _file(tmp_path / "large", b"k" * 5000)),
        "not ASCII": (None, _file(tmp_path / "bytes", b"\xff" * 40)),
    }
    for expected, (key, path) in bad.items():
        with pytest.raises(ConfigError, match=expected) as caught:
            read_key(key, path)
        assert "secre" not in str(caught.value)


def test_a_secret_that_a_group_may_read_is_taken(tmp_path: Path) -> None:
    assert read_key(None, _file(tmp_path / "key", GOOD.encode(), 0o440)) == GOOD.encode()
