"""This flusher's lease on the run: kept alive, checked before every publish, renewed for each stager.

A flusher may outlive several MPI jobs. Each stager that attaches gets an attempt of its own, because attempts order
checkpoints: a job restored from step 100 must count as newer than step 150 of the job before.
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
    """Holds the lease, a claim file in the store. Any thread.

    Args:
        heartbeat_seconds: Interval of the heartbeats that show other hosts that this writer is alive.

    Raises:
        FencedError: Another writer is alive.
    """

    def __init__(self, store: Store, heartbeat_seconds: float) -> None:
        self._store, self._heartbeat_seconds = store, heartbeat_seconds
        self._lock = threading.Lock()  # no check of the old claim during a renewal
        self._claim = Lease.acquire(store, heartbeat_seconds=heartbeat_seconds)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def attempt(self) -> int:
        return self._claim.attempt

    @property
    def prior_failures(self) -> FailureCount:
        """The failures of the attempts before this one."""
        return self._claim.prior_failures

    # These never wait: the next heartbeat writes it to the store. Without one the next writer counts the job as lost.

    def begin_work(self) -> None:
        """Note that the job of this attempt has begun a checkpoint."""
        self._claim.begin_work()

    def end_work(self, *, lost: bool) -> None:
        """Note that the job of this attempt is over."""
        self._claim.end_work(lost=lost)

    def resume_work(self) -> None:
        """Note that a stager continues the attempt of a dead flusher."""
        self._claim.resume_work()

    def check(self) -> None:
        """Check that this flusher still holds the lease; raises `FencedError` if not."""
        with self._lock:
            self._claim.check()

    def check_once(self) -> None:
        """As `check`, but asks the store only once: for a caller that retries by itself."""
        with self._lock:
            self._claim.check(without_retries=True)

    def remove_if_dangling(self, manifest: Manifest) -> None:
        """Remove a manifest that was just written, if its file has gone meanwhile.

        A writer that was suspended for long may write the manifest after its successor removed the file. Only this
        writer uses that name, so it may remove the manifest although the run is another's.

        Raises:
            FencedError: The manifest was removed, and the run is another's.
            DamageError: The manifest was removed, because its file is gone.
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
            self._claim.beat()  # checks, and stores how this job ended, for the next claim
            # The takeover is of our own claim: nobody else loses anything. If the store's answers are lost, the next
            # claim may exist while this one continues; `tried` tells it from another writer's.
            self._claim = Lease.acquire(
                self._store,
                heartbeat_seconds=self._heartbeat_seconds,
                takeover=True,
                claimed_ids=self._claim.unanswered,
            )
            return self._claim.attempt

    def start_heartbeat(self, on_fenced: Callable[[FencedError], None]) -> None:
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
    """Lease of a flusher that does not lead: it publishes and removes nothing, so it needs no claim.

    It has no attempt of its own: each stager brings that of the lead.
    """

    def __init__(self) -> None:
        self._attempt = 1  # of a ring that no stager has attached to

    @property
    def attempt(self) -> int:
        return self._attempt

    @property
    def prior_failures(self) -> FailureCount:
        return FailureCount()

    def begin_work(self) -> None: ...

    def end_work(self, *, lost: bool) -> None: ...

    def resume_work(self) -> None: ...

    def check(self) -> None: ...

    def check_once(self) -> None: ...

    def remove_if_dangling(self, manifest: Manifest) -> None: ...

    def start_heartbeat(self, on_fenced: Callable[[FencedError], None]) -> None: ...

    def end(self) -> None: ...


_PID_NAME = "flusher.pid"
_PID_BYTES_MAX = 32
_EXIT_SECONDS_MAX = 10.0
_RETRY_SECONDS = 0.05
_MISSES_MAX = 3


class InstanceLease:
    """Lock of the run's only flusher on this machine.

    A flusher that ends closes its socket a moment before it releases the lock, so a holder without a socket is waited
    for. One that is starting, or was stopped as it ended, is waited for as long.

    Args:
        directory: The run's runtime directory; made if missing.
        exit_seconds_max: How long to wait for a holder that stagers cannot connect to.

    Raises:
        FencedError: Another flusher holds it; names its pid.
        ConfigError: The directory is not private to this user.
    """

    def __init__(self, directory: Path, *, exit_seconds_max: float = _EXIT_SECONDS_MAX) -> None:
        self.directory = directory
        self._path = directory / _PID_NAME
        self._fd = self._lock(time.monotonic() + exit_seconds_max)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def _lock(self, deadline: float) -> int:
        listens = misses = 0
        while True:
            try:
                make_private_directory(self.directory)  # each time: a flusher that ends may have removed it
                fd = open_private_file(self._path, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:
                misses += 1
                if misses > _MISSES_MAX:  # not a race with a removal: it cannot be made
                    raise
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.pread(fd, _PID_BYTES_MAX, 0).decode("ascii", "replace").strip() or "unknown"
                os.close(fd)
                # Seen twice: a flusher that closes the socket removes its name right after.
                listens = listens + 1 if (self.directory / SOCKET_NAME).exists() else 0
                if listens < 2 and time.monotonic() < deadline:
                    time.sleep(_RETRY_SECONDS)
                    continue
                raise FencedError(
                    f"process {pid} is already the flusher of this run ({self.directory}); let it finish, or end it"
                ) from None
            # The previous holder may have removed the file between our open and our lock, which is then worthless.
            try:
                if os.path.samestat(os.fstat(fd), self._path.lstat()):
                    return fd
            except FileNotFoundError:
                pass
            os.close(fd)

    def release(self, *, keep_directory: bool) -> None:
        """Release the lock; remove the directory unless something in it is still wanted."""
        self._path.unlink(missing_ok=True)
        if not keep_directory:
            with contextlib.suppress(OSError):  # not empty: the next flusher may already be at work in it
                self.directory.rmdir()
        os.close(self._fd)
