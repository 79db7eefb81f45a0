"""A refused lock names its cause."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from holdfast.store.file_system import file_system_of
from trainer_side.save import host_memory
from trainer_side.save.host_memory import slot_tensor
from trainer_side.tiers.first_touch import huge_buffer

_PAGE_BYTES = mmap.PAGESIZE


class Refusing:
    """A runtime that refuses every lock with one error."""

    def __init__(self, code: int) -> None:
        self.code = code

    def lock(self, _address: int, _nbytes: int) -> int:
        return self.code

    def unlock(self, _address: int) -> None:
        raise AssertionError("nothing was locked")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (2, "error 2: no more memory may be locked; raise the limit of locked memory"),
        (1, "error 1: the driver does not take these pages"),
        (712, "error 712: another library has locked a part of it"),
        (801, "error 801: this device or driver cannot lock memory in place"),
        (-1, "error -1: this runtime has no call for it"),
        (999, "error 999: look this number up"),
    ],
)
def test_a_refused_lock_names_the_cause_of_its_number(
    code: int, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_memory, "device_runtime", lambda: Refusing(code))
    memory = huge_buffer(_PAGE_BYTES)
    assert (host_memory.lock(memory) or "").startswith(words)
    if code != 2:
        assert "ulimit" not in caplog.text
    slot_tensor(memory.numpy().data, pinned=True)
    assert f"cannot lock {_PAGE_BYTES} bytes of a local tier: {words}" in caplog.text


def test_a_mapped_file_is_named_with_its_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a name with blanks"
    file.write_bytes(bytes(2 * _PAGE_BYTES))
    with file.open("r+b") as opened:
        mapped = mmap.mmap(opened.fileno(), 2 * _PAGE_BYTES)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)[_PAGE_BYTES:]
    monkeypatch.setattr(host_memory, "device_runtime", lambda: Refusing(1))
    assert (host_memory.lock(memory) or "").startswith(
        f"error 1: it is the mapped file {file} on {file_system_of(tmp_path)}, and only files in memory"
    )
