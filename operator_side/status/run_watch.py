"""One look at a run: asks stager and flusher, reads ring and store, returns the status. All I/O of the command.

runtime directory ─► stager, flusher (telemetry/status_socket.py) ─┐
                   └► ring (ring_files.py) ────────────────────────┼─► compose ─► RunStatus
store ─► newest manifests, if no flusher answers ──────────────────┘
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from holdfast.config import FlusherConfig
from holdfast.errors import HoldfastError, PeerLost, ProtocolError, StoreError, StoreMissing
from holdfast.ring.directory import runtime_directory, share_directories, share_of
from holdfast.ring.doorbell import SOCKET_NAME
from holdfast.telemetry.rows import StoredCheckpoint
from holdfast.telemetry.status_document import StatusDocument
from holdfast.telemetry.status_socket import request_status, socket_path
from operator_side.status.ring_files import RingFiles, RingSnapshot
from operator_side.status.run_status import Peer, RunEvidence, RunStatus, compose
from operator_side.status.share_progress import ShareSnapshot

if TYPE_CHECKING:
    from holdfast.store.base import Store


_ANSWER_SECONDS_MAX = 2.0
_STORE_POLL_SECONDS = 30.0
_WRITER_POLL_SECONDS = 2.0  # the writer may be about to end
_STORE_PAUSE_FACTOR = 10  # listing thousands of checkpoints takes long: do it rarely
_CHECKPOINTS_MAX = 8
_ANY_ATTEMPT = 2**62
_PID_BYTES_MAX = 32
_RUN_FILES = ("journal", SOCKET_NAME, "flusher-status.sock", "stager-status.sock")


def find_runs(base: Path) -> list[Path]:
    """Return the runtime directories of runs in `base`, or `base` itself if it is one."""
    with contextlib.suppress(OSError):
        if _is_run(base):
            return [base]
        runs = {path for path in base.iterdir() if path.is_dir() and _is_run(path)}
        return sorted(runs - {share for run in runs for share in share_directories(run).values()})
    return []


def _is_run(directory: Path) -> bool:
    return any((directory / name).exists() for name in _RUN_FILES)


class RunWatch:
    """Looks at one run repeatedly. Its runtime directory need not exist. Without `url`, stager and flusher name it."""

    def __init__(
        self,
        directory: Path,
        url: str | None = None,
        *,
        dollars_per_hour: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directory, self._url = directory, url
        self._dollars_per_hour, self._clock = dollars_per_hour, clock
        self._ring = RingFiles(directory)
        self._rings: dict[Path, RingFiles] = {}  # of the run's other stagers on this machine
        self._stored: tuple[StoredCheckpoint, ...] = ()
        self._store_notes: tuple[str, ...] = ()
        self._next_store_read_at = 0.0
        self._has_polled = self._has_writer = False

    def poll(self) -> RunStatus:
        """Return the status of the run now. Raises `StoreMissing`: there is no ring, no process answers, and the store
        is empty; `StoreError`: there is nothing on this machine, and the store does not answer.
        """
        notes: list[str] = []
        flusher, flusher_document = self._ask("flusher", notes)
        stager, stager_document = self._ask("stager", notes)
        if stager.state == "gone" and flusher_document is not None and flusher_document.stager_attached:
            stager = Peer("silent", note="it is attached to the flusher, but does not answer")
        ring = self._read_ring(self._ring, notes)
        document = flusher_document or stager_document
        if document is not None and self._url is None:
            self._url = document.run
        if flusher.state == "gone":
            nothing_here = ring is None and stager.state == "gone"
            self._poll_store(may_fail=nothing_here and not self._has_polled)
            notes += self._store_notes
            is_staged = ring is not None and any(one.state == "staged" for one in ring.checkpoints)
            if stager.state == "gone" and ring is not None and is_staged:
                command = self._flusher_command(share_of(self.directory), ring)
                notes.append(f"the next job publishes the staged checkpoints in the ring; or run {command}")
        self._has_polled = True
        others = self._read_other_shares(notes)
        found = RunEvidence(
            flusher, stager, flusher_document, stager_document, ring, others, self._stored, notes
        )
        name = self._url or f"run key {self.directory.name}"
        return compose(name, self._clock(), found, dollars_per_hour=self._dollars_per_hour)

    def _ask(
        self, role: Literal["stager", "flusher"], notes: list[str], directory: Path | None = None
    ) -> tuple[Peer, StatusDocument | None]:
        directory = directory or self.directory
        try:
            document = request_status(socket_path(directory, role), seconds_max=_ANSWER_SECONDS_MAX)
        except PeerLost as error:
            return Peer("silent", note=str(error)), None
        except ProtocolError as error:
            notes.append(str(error))
            return Peer("silent", note="its answer does not fit this version of holdfast"), None
        if document is not None:
            return Peer("here", document.pid, document.since_unix), document
        # A socket file without a listener means that the process is dead; another process may have its pid by now.
        has_no_socket = not socket_path(directory, role).exists()
        pid = self._flusher_pid(directory) if role == "flusher" and has_no_socket else None
        if pid is not None:
            return Peer(
                "silent", pid, note="it has no socket for status; it may be of an older version"
            ), None
        return Peer("gone"), None

    @staticmethod
    def _flusher_pid(directory: Path) -> int | None:
        """Return the process in the flusher's pid file, if it is alive."""
        try:
            text = (directory / "flusher.pid").read_bytes()[:_PID_BYTES_MAX].decode("ascii", "replace")
            pid = int(text)
            os.kill(pid, 0)
        except (OSError, ValueError, OverflowError):
            return None
        return pid

    def _read_other_shares(self, notes: list[str]) -> list[ShareSnapshot]:
        found: list[ShareSnapshot] = []
        for index, directory in share_directories(self.directory).items():
            ring = self._read_ring(self._rings.setdefault(directory, RingFiles(directory)), notes)
            flusher, document = self._ask("flusher", notes, directory)
            if ring is not None or document is not None:
                found.append(ShareSnapshot(index, ring, document))
            if flusher.state == "gone" and ring is not None and ring.checkpoints:
                command = self._flusher_command(index, ring)
                notes.append(f"the ring of share {index + 1} has checkpoints and no flusher; run {command}")
        return found

    def _flusher_command(self, index: int, ring: RingSnapshot) -> str:
        writers = max(index + 1, ring.writers)
        share = f" --share {index + 1}/{writers}" if writers > 1 else ""
        return f"`holdfast flusher --store {self._url or 'URL'}{share}`"

    @staticmethod
    def _read_ring(files: RingFiles, notes: list[str]) -> RingSnapshot | None:
        try:
            ring = files.snapshot()
        except HoldfastError as error:
            notes.append(f"the ring cannot be read: {error}")
            return None
        if ring is not None and ring.trouble:
            notes.append(ring.trouble)
        return ring

    # -- the store -------------------------------------------------------------------------------------------------

    def _poll_store(self, *, may_fail: bool) -> None:
        begun = time.monotonic()
        if self._url is None or begun < self._next_store_read_at:
            return
        from holdfast.store import open_store  # imports boto3 or fsspec: not for --help

        store: Store | None = None
        try:
            store = open_store(self._url)
            self._read_store(store)
        except (StoreMissing, StoreError) as error:
            if may_fail:
                raise
            self._store_notes = (f"the store cannot be read: {error}",)
        finally:
            if store is not None:
                store.close()
            now = time.monotonic()
            pause_seconds = _WRITER_POLL_SECONDS if self._has_writer else _STORE_POLL_SECONDS
            self._next_store_read_at = now + max(pause_seconds, _STORE_PAUSE_FACTOR * (now - begun))

    def _read_store(self, store: Store) -> None:
        from holdfast.checkpoints.catalog import Catalog
        from holdfast.checkpoints.lease import find_possibly_live_writer

        listing = Catalog(store).read_listing()
        if listing.is_empty:
            raise StoreMissing(
                f"{store.url}: this machine has neither a flusher nor a ring of this run ({self.directory}), and there "
                "is nothing at this URL; check the URL"
            )
        newest = list(itertools.islice(listing.items(listing.current), _CHECKPOINTS_MAX))
        manifests = [item.manifest for item in newest if item.manifest is not None]
        self._stored = tuple(
            stored for one in manifests if (stored := StoredCheckpoint.from_manifest(one)) is not None
        )
        notes = [item.fault for item in newest if item.fault]
        writer = find_possibly_live_writer(store, _ANY_ATTEMPT)
        self._has_writer = bool(writer)
        if writer:
            notes.append(
                f"{writer} has the claim on the run: it runs on another machine, is ending, or was killed"
            )
        if listing.branches is not None:
            notes.append(listing.branches.sentence())
        self._store_notes = tuple(notes)


class RunWatches:
    """Looks repeatedly at the named run, or at all runs of this machine, and keeps runs that have ended. `keys`: name
    of a run in its status → its run key.
    """

    def __init__(self, run: str | None, runtime_dir: Path | None, dollars_per_hour: float | None) -> None:
        # Read the setting as the roles do; their class requires a store, which does not matter here.
        self._base = FlusherConfig.from_sources(store=run or "none", runtime_dir=runtime_dir).runtime_dir
        self._dollars_per_hour = dollars_per_hour
        self._run = run
        self.keys: dict[str, str] = {}
        self._watches: dict[Path, RunWatch] = {}

    def poll(self) -> list[RunStatus]:
        self._find_runs()
        if not self._watches:
            raise StoreMissing(
                f"{self._run or self._base}: there is no such run on this machine; name the URL of a run, or start the "
                "command on the machine of its stager (`ssh HOST holdfast status`)"
            )
        found = [watch.poll() for watch in self._watches.values()]
        self.keys = {one.run: directory.name for one, directory in zip(found, self._watches, strict=True)}
        return sorted(found, key=lambda one: one.newest_unix, reverse=True)

    def _find_runs(self) -> None:
        place = self._base if self._run is None else Path(self._run)
        for directory in find_runs(place.absolute()):
            if directory not in self._watches:
                self._watches[directory] = RunWatch(directory, dollars_per_hour=self._dollars_per_hour)
        if not self._watches and self._run is not None:
            directory = runtime_directory(self._run, self._base)
            self._watches[directory] = RunWatch(directory, self._run, dollars_per_hour=self._dollars_per_hour)
