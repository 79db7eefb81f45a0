"""From start to end of a flusher process: what is taken in which order, and given back in the other.

    lock on this machine ─► store answers ─► claim on the run ─► sweep the store, publish a dead flusher's ring
    ─► new ring ─► socket ─► ready ─► Service.run ─► socket, ring, claim and lock are given back

A flusher that fails leaves the ring where it is: the next one looks into it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flusher.engine import Engine
from flusher.instance import Instance
from flusher.recovery import feed, survey
from flusher.service import Service
from flusher.steps import Key
from flusher.tenure import Tenure
from flusher.upkeep import ReadBack, Upkeep
from flusher.workers import Inbox
from holdfast.config import FlusherConfig
from holdfast.errors import ConfigError, FencedError, HoldfastError, ProtocolError
from holdfast.events import EventLog
from holdfast.ipc import SOCKET_NAME, Listener
from holdfast.manifest import Manifest
from holdfast.ring import Ring
from holdfast.runtime import runtime_directory
from holdfast.storage import open_store
from holdfast.storage.base import Store

__all__ = ["live"]

_log = logging.getLogger("holdfast.flusher")


def live(config: FlusherConfig, ready: Callable[[dict[str, Any]], None]) -> None:
    """Be the flusher of a run until all is done. Main thread only: it handles signals.

    Args:
        config: The settings.
        ready: Called once when stagers may connect, with `{"directory", "attempt"}`.

    Raises:
        FencedError: Another flusher serves this run, here or elsewhere, or took it over.
        ConfigError: The ring does not fit, or its directory is not safely ours.
        StoreError: The store does not answer or does not take writes.
    """
    with contextlib.ExitStack() as held:
        events = EventLog(config.events, role="flusher")
        held.callback(events.close)
        store = open_store(config.store)
        held.callback(_close_store, store)
        directory = runtime_directory(config.store, config.runtime_dir)
        held.enter_context(_instance(directory))
        store.check(write=True)
        inbox = Inbox()
        held.callback(inbox.close)  # last of these: the threads of the others still speak into it
        tenure = Tenure(store, config.heartbeat_seconds)
        held.callback(tenure.end)
        upkeep = Upkeep(
            store,
            tenure,
            inbox,
            verify=config.verify,
            keep_last=config.keep_last,
            keep_every=config.keep_every,
        )
        held.callback(upkeep.stop)
        for removed in store.sweep():
            events.emit("swept", {"what": removed})
        _recover(directory, config, store, tenure, upkeep, inbox, events)
        ring = held.enter_context(_new_ring(directory, config, tenure.attempt))
        listener = Listener(directory / SOCKET_NAME)
        held.callback(listener.close)
        service = Service(
            config, ring, store, tenure, upkeep=upkeep, inbox=inbox, listener=listener, events=events
        )
        events.emit("flusher_ready", {"attempt": tenure.attempt, "directory": str(directory)})
        ready({"directory": str(directory), "attempt": tenure.attempt})
        service.run()
        events.emit("flusher_ended", {"attempt": tenure.attempt})


@contextlib.contextmanager
def _instance(directory: Path) -> Iterator[None]:
    instance = Instance(directory)
    try:
        yield
    except BaseException:
        instance.release(keep_directory=(directory / "journal").exists())
        raise
    instance.release(keep_directory=False)


@contextlib.contextmanager
def _new_ring(directory: Path, config: FlusherConfig, attempt: int) -> Iterator[Ring]:
    ring = Ring.create(
        directory, chunk_bytes=config.chunk_bytes, ring_chunks=config.ring_chunks, attempt=attempt
    )
    with ring:
        try:
            yield ring
        except FencedError:
            Ring.remove(directory)  # what is in it belongs to a run that is somebody else's now
            raise
    Ring.remove(directory)


def _close_store(store: Store) -> None:
    close = getattr(store, "close", None)
    if close is not None:
        close()


def _recover(
    directory: Path,
    config: FlusherConfig,
    store: Store,
    tenure: Tenure,
    upkeep: Upkeep,
    inbox: Inbox,
    events: EventLog,
) -> None:
    """Publish what a dead flusher left whole, report what it did not, and remove its ring."""
    if (directory / "journal").exists():
        try:
            ring = Ring.attach(directory)
        except (ProtocolError, ConfigError) as error:
            _log.error("ring of a flusher that ended too early is not readable and is removed: %s", error)
            events.emit("ring_lost", {"message": str(error)})
        else:
            with ring:
                _publish_leftovers(ring, config, store, tenure, upkeep, inbox, events)
    Ring.remove(directory)


def _publish_leftovers(
    ring: Ring,
    config: FlusherConfig,
    store: Store,
    tenure: Tenure,
    upkeep: Upkeep,
    inbox: Inbox,
    events: EventLog,
) -> None:
    found = survey(ring)
    for key, error in found.lost.items():
        _log.warning("%s", error)
        events.emit("flush_failed", {"code": error.code, "message": str(error)}, step=key.step)
    engine = Engine(ring, store, tenure, upkeep, inbox, events, writers=config.writers, listener=_Quiet())
    try:
        for key, _, _ in found.whole:
            events.emit("recovered", {"attempt": key.attempt}, step=key.step)
        feed(engine, found)
        while not engine.idle:
            inbox.wait(engine.wait_seconds())
            engine.turn()
    finally:
        engine.stop()


class _Quiet:
    """Nobody is there to be told; the event log says it all."""

    def began(self, key: Key, part_chunks: int) -> None:
        pass

    def freed(self, slots: tuple[int, ...]) -> None:
        pass

    def durable(self, key: Key, manifest: Manifest) -> None:
        _log.info("%s: recovered from the ring as %s", key, manifest.file)

    def read_back(self, result: ReadBack) -> None:
        pass

    def failed(self, key: Key, error: HoldfastError) -> None:
        _log.error("%s: could not be recovered: %s", key, error)
