"""One flusher per run and machine, even if a dead one left files."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from flusher.writer_lease import InstanceLease, WriterLease
from holdfast.checkpoints.lease import Lease
from holdfast.errors import ConfigError, FencedError, StoreError
from holdfast.ring.doorbell import SOCKET_NAME
from holdfast.store import open_store
from holdfast.store.base import Store

_HOLD = """
import sys, pathlib, time
from flusher.writer_lease import InstanceLease
held = InstanceLease(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
held.release(keep_directory=False)
"""
_SECONDS_MAX = 60.0


@contextlib.contextmanager
def _holder(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Run another process that holds the lease until released."""
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    with holder.stdout as output, holder.stdin:
        assert output.readline() == "held\n"
        try:
            yield holder
        finally:
            holder.kill()
            holder.wait()


def test_a_live_one_is_named_and_a_killed_one_is_no_obstacle(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with _holder(directory) as holder:
        (directory / SOCKET_NAME).touch()
        with pytest.raises(FencedError, match=f"process {holder.pid} is already"):
            InstanceLease(directory, exit_seconds_max=_SECONDS_MAX)
        (directory / SOCKET_NAME).unlink()
    assert (directory / "flusher.pid").exists()
    InstanceLease(directory).release(keep_directory=False)
    assert not directory.exists()


def test_an_ending_holder_is_waited_for(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with _holder(directory) as holder, ThreadPoolExecutor(1) as pool:
        following = pool.submit(InstanceLease, directory, exit_seconds_max=_SECONDS_MAX)
        assert wait([following], timeout=0.3).not_done
        holder.communicate("\n", timeout=_SECONDS_MAX)
        held = following.result(_SECONDS_MAX)
    assert (directory / "flusher.pid").read_text().split() == [str(os.getpid())]
    held.release(keep_directory=False)


def test_a_holder_that_neither_ends_nor_serves_is_waited_for_no_longer(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with _holder(directory) as holder, pytest.raises(FencedError, match=f"process {holder.pid} is already"):
        InstanceLease(directory, exit_seconds_max=0.2)


def test_released_keeps_the_directory_if_asked_or_not_empty(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    InstanceLease(directory).release(keep_directory=True)
    assert list(directory.iterdir()) == []
    held = InstanceLease(directory)
    (directory / "ring").touch()
    held.release(keep_directory=False)
    assert [path.name for path in directory.iterdir()] == ["ring"]


def test_a_directory_that_cannot_be_made_is_no_reason_to_wait() -> None:
    with pytest.raises(FileNotFoundError):
        InstanceLease(Path("/proc/holdfast/run"))


def test_a_link_in_place_of_the_pid_file_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (directory / "flusher.pid").symlink_to(victim)
    with pytest.raises(ConfigError):
        InstanceLease(directory)
    assert victim.read_text() == "precious"


def _renewed_unheard(directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Store, WriterLease]:
    """Return a lease whose next claim is in the store, but whose answer was lost."""
    store = open_store(str(directory / "run"))
    lease = WriterLease(store, 5.0)
    create = store.create

    def unheard(name: str, data: bytes) -> bool:
        create(name, data)
        raise StoreError("the answer is lost", retriable=True)

    with monkeypatch.context() as patched:
        patched.setattr(store, "create", unheard)
        with pytest.raises(StoreError, match="the answer is lost"):
            lease.renew()
    return store, lease


def test_a_claim_of_its_own_whose_answer_was_lost_fences_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next stager's claim is in the store, and the flusher has not heard so: what is staged stays its own."""
    store, lease = _renewed_unheard(tmp_path, monkeypatch)
    claims = [info.name for info in store.list() if "writer-" in info.name]
    assert len(claims) == 2, "nothing was lost but the answer"
    lease.check()
    assert lease.attempt == 1
    assert lease.renew() == 2
    lease.check()
    Lease.acquire(store, takeover=True)
    with pytest.raises(FencedError, match=r"attempt 3 .* took the run over; attempt 2 stops"):
        lease.check()


def test_a_claim_of_its_own_below_that_of_another_writer_helps_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, lease = _renewed_unheard(tmp_path, monkeypatch)
    Lease.acquire(store, takeover=True)
    with pytest.raises(FencedError, match="attempt 3"):
        lease.check()
