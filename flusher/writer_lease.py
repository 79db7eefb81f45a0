"""This flusher's lease of the run: kept alive, checked before every publish, renewed for each stager.

A flusher may outlive several MPI jobs. Each stager that attaches gets an attempt of its own, because attempts order
checkpoints: a job that was restored from step 100 must count as newer than step 150 of the job before.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.checkpoints.lease import Lease
from holdfast.errors import DamageError, FencedError, StoreError, StoreMissing
from holdfast.image.manifest import Manifest, manifest_name
from holdfast.ring.directory import make_private_directory, open_private_file
from holdfast.ring.doorbell import SOCKET_NAME
from holdfast.store.base import Store
from holdfast.wire.failure_count import FailureCount

_log = logging.getLogger("holdfast.flusher")


class WriterLease:
    """Holds the lease, a claim file in the store. May be used from any thread.

    Args:
        heartbeat_seconds: How often other hosts are shown that we live.

    Raises:
        FencedError: Another writer is alive.
    """

    def __init__(self, store: Store, heartbeat_seconds: float) -> None:
        self._store, self._heartbeat_seconds = store, heartbeat_seconds
        self._lock = threading.Lock()  # a check must not meet the old claim while it is renewed
        self._claim = Lease.take(store, heartbeat_seconds=heartbeat_seconds)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def attempt(self) -> int:
        return self._claim.attempt

    @property
    def seen(self) -> FailureCount:
        """The failures of the attempts before this one."""
        return self._claim.seen

    # These never wait: the next heartbeat carries it to the store, and who finds none takes a running job for lost.

    def begin_work(self) -> None:
        """The job of this attempt has begun a checkpoint."""
        self._claim.begin_work()

    def end_work(self, *, lost: bool) -> None:
        """The job of this attempt is over."""
        self._claim.end_work(lost=lost)

    def resume_work(self) -> None:
        """A stager goes on with the attempt that a dead flusher had."""
        self._claim.resume_work()

    def check(self) -> None:
        """Check that this flusher still holds the lease; raises `FencedError` if not."""
        with self._lock:
            self._claim.check()

    def check_once(self) -> None:
        """As `check`, but asks the store only once: for a caller that retries by itself."""
        with self._lock:
            self._claim.check(at_once=True)

    def keep_whole(self, manifest: Manifest) -> None:
        """After a manifest was written: take it back if its file has gone meanwhile.

        A writer that stood still for long writes it when who took the run over has cleared the file away. That name is
        this writer's alone, so its manifest may be removed though the run is another's.

        Raises:
            FencedError: It was taken back, and the run is another's.
            DamageError: The manifest was taken back, because its file is gone.
            StoreError: The store failed.
        """
        store, name = self._store, manifest_name(manifest.file)
        try:
            store.size(manifest.file)
            return
        except StoreMissing:
            with contextlib.suppress(StoreMissing):
                if Manifest.from_bytes(store.read(name), source=name).write_id == manifest.write_id:
                    store.delete(name)
        self.check()
        raise DamageError(f"{store.url}/{manifest.file}: was removed while its manifest was written")

    def renew(self) -> int:
        """Acquire the next attempt, for another stager, and return it. Raises `FencedError`, `StoreError`."""
        with self._lock:
            self._claim.beat()  # as `check`, and the next claim reads how the job of this one ended
            # Our own claim is the one that is taken over: nobody else lost anything. Where the answers of the store are
            # lost, the next claim may be there, and this one goes on: it must not take that for another writer's.
            self._claim = Lease.take(
                self._store,
                heartbeat_seconds=self._heartbeat_seconds,
                takeover=True,
                tried=self._claim.unanswered,
            )
            return self._claim.attempt

    def start_beating(self, on_fenced: Callable[[FencedError], None]) -> None:
        """Send heartbeats from a thread of their own: a slow upload must not make this flusher look dead."""

        def beat() -> None:
            while not self._ended.wait(self._heartbeat_seconds):
                try:
                    with self._lock:
                        self._claim.beat()
                except FencedError as error:
                    on_fenced(error)
                    return
                except StoreError as error:
                    _log.warning("no heartbeat: %s", error)

        self._thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop beating and release the claim."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._claim.release()


class MemberLease(WriterLease):
    """The lease of a flusher that does not lead: it publishes and removes nothing, so it acquires none.

    It has no attempt of its own: each stager brings that of the lead.
    """

    def __init__(self) -> None:
        self._attempt = 1  # of a ring that no stager has attached to

    @property
    def attempt(self) -> int:
        return self._attempt

    @property
    def seen(self) -> FailureCount:
        return FailureCount()

    def begin_work(self) -> None: ...

    def end_work(self, *, lost: bool) -> None: ...

    def resume_work(self) -> None: ...

    def check(self) -> None: ...

    def check_once(self) -> None: ...

    def keep_whole(self, manifest: Manifest) -> None: ...

    def start_beating(self, on_fenced: Callable[[FencedError], None]) -> None: ...

    def end(self) -> None: ...


_PID_NAME = "flusher.pid"
_PID_BYTES_MAX = 32
_ENDS_SECONDS_MAX = 10.0
_LOOK_AGAIN_SECONDS = 0.05
_MISSES_MAX = 3


class InstanceLease:
    """The lock of the run's only flusher on this machine.

    One that ends has closed its socket, and gives the right back a moment later: it is waited for. One that begins, or
    that was stopped as it ended, is waited for as long.

    Args:
        directory: The run's runtime directory; made if it is not there.
        ends_seconds_max: How long one is waited for that stagers cannot connect to.

    Raises:
        FencedError: Another flusher holds it; names its pid.
        ConfigError: The directory is not safely ours.
    """

    def __init__(self, directory: Path, *, ends_seconds_max: float = _ENDS_SECONDS_MAX) -> None:
        self.directory = directory
        self._path = directory / _PID_NAME
        self._fd = self._lock(time.monotonic() + ends_seconds_max)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def _lock(self, deadline: float) -> int:
        listens = misses = 0
        while True:
            try:
                make_private_directory(self.directory)  # each time: one that ends may have removed it
                fd = open_private_file(self._path, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:
                misses += 1
                if misses > _MISSES_MAX:  # nobody has removed it: it cannot be made
                    raise
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.pread(fd, _PID_BYTES_MAX, 0).decode("ascii", "replace").strip() or "unknown"
                os.close(fd)
                # Twice: who is just closing the socket removes its name next.
                listens = listens + 1 if (self.directory / SOCKET_NAME).exists() else 0
                if listens < 2 and time.monotonic() < deadline:
                    time.sleep(_LOOK_AGAIN_SECONDS)
                    continue
                raise FencedError(
                    f"process {pid} is already the flusher of this run ({self.directory}); let it finish, or end it"
                ) from None
            # The one before may have removed the file between our open and our lock: then we hold nothing.
            try:
                if os.path.samestat(os.fstat(fd), self._path.lstat()):
                    return fd
            except FileNotFoundError:
                pass
            os.close(fd)

    def release(self, *, keep_directory: bool) -> None:
        """Give the right back; remove the directory unless something in it is still wanted."""
        self._path.unlink(missing_ok=True)
        if not keep_directory:
            with contextlib.suppress(OSError):  # not empty: the next flusher may already be at work in it
                self.directory.rmdir()
        os.close(self._fd)
