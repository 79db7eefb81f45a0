"""Which file-system errors are transient, and which a person must fix."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast.errors import StoreError, StoreMissing
from holdfast.store.posix_errors import free_bytes, translate_errors


def _raised(number: int, **settings: str) -> StoreError:
    with (
        pytest.raises(StoreError) as caught,
        translate_errors("write", Path("/mnt/run/x"), needed_bytes=123, **settings),
    ):
        raise OSError(number, os.strerror(number))
    return caught.value


@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EFBIG, errno.EMFILE]
)
def test_an_error_that_a_person_must_mend_names_path_cause_and_remedy(number: int) -> None:
    error = _raised(number)
    assert not error.retriable
    assert "/mnt/run/x" in str(error)
    assert os.strerror(number) in str(error)
    assert "; " in str(error)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_says_how_much_is_needed_and_free(number: int) -> None:
    error = _raised(number)
    assert not error.retriable
    assert not error.begin_anew
    assert "123 bytes are needed" in str(error)
    assert "keep_last" in str(error)


@pytest.mark.parametrize(
    ("number", "says"), [(errno.EIO, "dmesg"), (errno.ESTALE, "mount it again"), (errno.ETIMEDOUT, "server")]
)
def test_a_network_file_systems_error_is_retriable_and_names_a_remedy(number: int, says: str) -> None:
    error = _raised(number)
    assert error.retriable
    assert not error.begin_anew
    assert says in str(error)


def test_missing_is_missing_or_swept() -> None:
    assert isinstance(_raised(errno.ENOENT), StoreMissing)
    swept = _raised(errno.ENOENT, if_missing="swept")
    assert swept.retriable
    lost = _raised(errno.ENOENT, if_missing="lost")
    assert (lost.retriable, lost.begin_anew) == (False, True)
    assert not isinstance(swept, StoreMissing)


def test_free_bytes_of_a_place_that_will_be() -> None:
    free = free_bytes(Path("/tmp/not/there/yet"))
    assert free is not None
    assert free > 0


def test_our_own_errors_pass_unchanged() -> None:
    with pytest.raises(StoreError, match="ours"), translate_errors("write", Path("/x")):
        raise StoreError("ours")
