"""Life of a flusher process: acquires lease, ring and threads in order, and releases them in the reverse order.

    lock on this machine ─► store answers ─► lease on the run ─► leftovers of dead writers removed, except live uploads
    ─► a dead flusher's ring, or a new one ─► socket ─► ready ─► FlusherService.run ─► socket, ring, lease, lock freed

If a flusher fails, the ring stays for the next one. Slow work waits until the socket exists, because a stager may be
waiting with slots that fill up.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flusher.engine import Engine
from flusher.flusher_context import FlusherContext
from flusher.listener import DurableStep, FlushListener
from flusher.orphaned_shares import find_orphans
from flusher.recovery import load_progress, resolve_checkpoints
from flusher.retention import RetentionPolicy
from flusher.ring_room import RingRoom
from flusher.service import FlusherService
from flusher.verify_and_prune import Maintenance, MaintenanceRules, NoMaintenance
from flusher.workers import Inbox
from flusher.writer_lease import InstanceLease, MemberLease, WriterLease
from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.intents import clear_intents
from holdfast.checkpoints.publish import writer_attempt
from holdfast.config import FlusherConfig
from holdfast.errors import ConfigError, FencedError, HoldfastError, ProtocolError
from holdfast.faultpoint import Point, reach
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.layout import chunk_bytes_for
from holdfast.process import ENDING_SIGNALS
from holdfast.ring.directory import runtime_directory
from holdfast.ring.doorbell import SOCKET_NAME, Listener
from holdfast.ring.ring import Ring
from holdfast.ring.ring_keeper import read_set_aside
from holdfast.store import open_store, require_parent
from holdfast.store.base import Store
from holdfast.store.concurrency import write_limit
from holdfast.store.guarded import guarded
from holdfast.store.names import is_kept
from holdfast.telemetry.events import EventLog
from holdfast.telemetry.metrics_page import serve_metrics
from holdfast.telemetry.status_socket import serve_status
from holdfast.telemetry.status_state import StatusState
from holdfast.telemetry.tracing import export_spans

_log = logging.getLogger("holdfast.flusher")


def run_flusher(config: FlusherConfig, ready: Callable[[dict[str, Any]], None]) -> None:
    """Run the flusher of a run until nothing is left to do. Main thread only: it handles signals, and ignores them at
    the end. `ready` is called once when stagers may connect, with `{"directory", "attempt"}`.

    Raises:
        FencedError: Another flusher serves this run, here or elsewhere, or took it over.
        ConfigError: The ring does not fit, or its directory is not private to this user.
        StoreError: The store does not answer or accepts no writes.
    """
    with contextlib.ExitStack() as stack:
        events = EventLog(config.events, role="flusher")
        stack.callback(events.close)
        store = open_store(config.store)
        stack.callback(store.close)
        # Entered before lease and ring, so that they are released before its exit, which may take seconds.
        stack.enter_context(export_spans("flusher", store.url, events))
        directory = runtime_directory(config.store, config.runtime_dir, share=config.share.index)
        stack.enter_context(_instance_lock(directory))
        require_parent(config.store, create=config.create)
        store.check(write=True)
        inbox = Inbox()
        stack.callback(inbox.close)  # after all that follow, whose threads still use it
        leads = config.share.is_lead
        lease = WriterLease(store, config.heartbeat_seconds) if leads else MemberLease()
        stack.callback(lease.end)
        if leads:
            store = guarded(store, lease.check_once)
        context = FlusherContext(store, lease, inbox, events, config.best_rule, config.share)
        keep = RetentionPolicy(
            config.keep_last,
            config.keep_every,
            config.hourly_kept,
            config.daily_kept,
            config.keep_best,
            config.best_rule,
        )
        rules = MaintenanceRules(
            config.verify, keep, config.reuse, refuse_nonfinite=config.on_nonfinite == "refuse"
        )
        maintenance_class = Maintenance if leads else NoMaintenance
        maintenance = maintenance_class(context, rules, set_aside=lambda: read_set_aside(directory))
        stack.callback(maintenance.stop)
        found = _find_ring(directory, events)
        try:
            orphans = _clean_store(store, lease.attempt, found, events) if leads else []
            if found is not None and not _fits(found, config):
                _publish_leftovers(found, config, context, maintenance)
                found.close()
                found = None
        except BaseException:
            if found is not None:
                found.close()
            raise
        ring = stack.enter_context(
            _ring(directory, config, store, lease.attempt, found, lambda: service.leaves_ring)
        )
        room = stack.enter_context(RingRoom(ring, inbox, grows=config.ring_bytes is None))
        stack.enter_context(serve_metrics(config, events, ring=ring, store=store))
        state = StatusState("flusher", store.url)
        events.add_listener(state.handle_event)
        stack.enter_context(serve_status(directory, "flusher", state.build_document))
        maintenance.catch_up()
        listener = Listener(directory / SOCKET_NAME)
        stack.callback(listener.close)
        service = FlusherService(
            config,
            ring,
            context,
            maintenance=maintenance,
            listener=listener,
            request_room=room.request,
            adopted=found is not None,
        )
        service.end_orphans(orphans)
        events.emit("flusher_ready", {"attempt": lease.attempt, "directory": str(directory)})
        ready({"directory": str(directory), "attempt": lease.attempt})
        for number in ENDING_SIGNALS:
            # `run` installs handlers of its own; after it, a signal must not cut the shutdown short
            signal.signal(number, signal.SIG_IGN)
        service.run()
        maintenance.stop()
        events.emit("flusher_ended", {"attempt": lease.attempt})


@contextlib.contextmanager
def _instance_lock(directory: Path) -> Iterator[None]:
    instance = InstanceLease(directory)
    try:
        yield
    except BaseException:
        instance.release(keep_directory=(directory / "journal").exists())
        raise
    instance.release(keep_directory=False)


@contextlib.contextmanager
def _ring(
    directory: Path,
    config: FlusherConfig,
    store: Store,
    attempt: int,
    found: Ring | None,
    keeps_ring: Callable[[], bool],
) -> Iterator[Ring]:
    """Yield the ring that was found, or a new one. Remove it at the end, unless the next flusher is to take it over."""
    if found is None:
        Ring.remove(directory, keep_doubts=True)
        chunk_bytes = config.chunk_bytes or chunk_bytes_for(_newest_image_bytes(store), config.ring_bytes)
        found = Ring.create(
            directory,
            chunk_bytes=chunk_bytes,
            ring_chunks=config.ring_chunks(chunk_bytes),
            attempt=attempt,
            room_chunks=0 if config.ring_bytes is not None else _total_bytes(directory) // chunk_bytes,
        )
    with found as ring:
        try:
            yield ring
        except FencedError:
            # Another writer owns the run, so the chunks are useless. Doubts about checkpoints published from here
            # are known only here: the next flusher on this machine marks them.
            Ring.remove(directory, keep_doubts=True)
            raise
    if not keeps_ring():
        Ring.remove(directory)


def _total_bytes(directory: Path) -> int:
    """Return the size of the file system: a ring there can never become larger."""
    found = os.statvfs(directory)
    return found.f_blocks * found.f_frsize


def _find_ring(directory: Path, events: EventLog) -> Ring | None:
    """Return the ring of a flusher that ended too early; None without one, or if it cannot be read."""
    if not (directory / "journal").exists():
        return None
    reach(Point.RECOVERING)
    try:
        return Ring.attach(directory)
    except (ProtocolError, ConfigError) as error:
        _log.error("the ring of a flusher that ended too early cannot be read, so it is removed: %s", error)
        events.emit("ring_lost", {"message": str(error)})
        return None


def _fits(ring: Ring, config: FlusherConfig) -> bool:
    """Whether the ring has the configured sizes; a size that is not configured may be any."""
    chunks_fit = config.chunk_bytes in (None, ring.chunk_bytes)
    return chunks_fit and (
        config.ring_bytes is None or config.ring_chunks(ring.chunk_bytes) == ring.ring_chunks
    )


def _newest_image_bytes(store: Store) -> int | None:
    """Return the size of the run's newest checkpoint whose manifest can be read; None without one."""
    items = Catalog(store).newest_first()
    return next((item.manifest.image_bytes for item in items if item.manifest is not None), None)


def _clean_store(store: Store, attempt: int, ring: Ring | None, events: EventLog) -> list[CheckpointId]:
    """Remove leftovers of dead flushers from the store, except uploads that are resumed. Return the checkpoints whose
    lead is gone while other flushers may still write shares of them.

    Uploads of later writers stay: this flusher may have been suspended since it acquired its lease.
    """
    objects = store.list()
    orphans = find_orphans(store, objects, attempt, () if ring is None else ring.checkpoint_ids())
    resumable = [] if ring is None else load_progress(ring)
    write_ids = {progress.head.write_id for progress in resumable} | set(orphans.values())

    def is_active(write_id: str) -> bool:
        return is_kept(write_id, write_ids) or writer_attempt(write_id) > attempt

    for removed in store.sweep(is_active):
        events.emit("swept", {"what": removed})
    for file in clear_intents(store, attempt, write_ids.__contains__, objects=objects):
        _log.warning(
            "%s: its writer died before its manifest was written, or while it was removed; removed", file
        )
        events.emit("swept", {"what": f"file without a manifest {file}"})
    return list(orphans)


def _publish_leftovers(
    ring: Ring, config: FlusherConfig, context: FlusherContext, maintenance: Maintenance
) -> None:
    """Publish what is staged in a ring of another size, which no stager can use any more."""
    engine = Engine(
        ring,
        context,
        maintenance,
        writers=write_limit(config.store, config.writers),
        listener=_LoggingListener(),
    )
    try:
        resolve_checkpoints(engine, ring, "its flusher ended, and the ring has another size now")
        while not engine.idle or maintenance.marks.is_pending:
            context.inbox.wait(engine.wait_seconds())
            engine.run_once()
    finally:
        engine.stop()


class _LoggingListener(FlushListener):
    """Listener of a flusher without a stager; the event log has the rest."""

    def durable(self, key: CheckpointId, durable: DurableStep) -> None:
        _log.info("%s: recovered from the ring as %s", key, durable.file)

    def failed(self, key: CheckpointId, error: HoldfastError) -> None:
        _log.error("%s: could not be recovered from the ring: %s", key, error)
