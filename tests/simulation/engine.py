"""Puts the fakes in place, and plays seeds one after the other, in a process used for nothing else."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import logging
import os
import re
import shutil
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from tests.simulation.runtime import SIM, install

__all__ = ["Outcome", "prepare", "run_seed"]

_ROOM_CHUNKS = 64
_numbers = itertools.count()
_KERNEL_CHOSE = re.compile(r"(process |pid': )\d+")


@dataclass
class Outcome:
    """The result of one seed."""

    seed: int
    failure: str
    events: int
    seconds: float
    trace: list[str]
    plan: str


_base: Path | None = None
_tcp_is_prepared = False


def prepare() -> None:  # noqa: C901 - one step for each thing that is replaced
    """Load the product and replace its access to the operating system. Call once per process."""
    global _base  # noqa: PLW0603
    if _base is not None:
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    import flusher.lifetime
    import flusher.ring_room
    import holdfast.config
    import stager.flusher_line
    import stager.flusher_process
    from flusher.progress import Progress
    from flusher.writer_lease import InstanceLease
    from holdfast.checkpoints import identity
    from holdfast.ring import doorbell as ipc
    from holdfast.ring.ring import Ring
    from holdfast.store import retrying
    from holdfast.telemetry.events import EventLog
    from tests.simulation import checks, world
    from tests.simulation.images import CHUNK_BYTES

    install()
    _base = Path(tempfile.mkdtemp(prefix="holdfast-sim-", dir="/dev/shm"))
    _base.chmod(0o700)

    def current() -> world.World:
        made: world.World = SIM.world
        return made

    checks.watch_ring(current)
    setattr(flusher.lifetime, "open_store", lambda url: current().open_store(url))  # noqa: B010
    # A slow store does not fail a start: as in `World.open_store`, only the number of attempts is limited.
    setattr(retrying, "_CHECK_BUDGET", replace(retrying._CHECK_BUDGET, seconds_max=1e9))  # noqa: B010
    # A ring of default size has eight slots, and grows by some at a time, up to the plan's memory.
    setattr(holdfast.config, "RING_BYTES", CHUNK_BYTES * checks.RING_CHUNKS)  # noqa: B010
    setattr(flusher.lifetime, "_total_bytes", lambda _: CHUNK_BYTES * _ROOM_CHUNKS)  # noqa: B010
    setattr(flusher.ring_room, "_STEP_BYTES_MIN", 7 * CHUNK_BYTES)  # noqa: B010
    setattr(flusher.ring_room, "_STEP_BYTES_MAX", 9 * CHUNK_BYTES)  # noqa: B010
    setattr(flusher.ring_room, "growth_bytes_in", lambda _: current().plan.growth_chunks * CHUNK_BYTES)  # noqa: B010
    log = _base / "flusher.log"
    for module in (stager.flusher_process, stager.flusher_line):
        setattr(module, "log_path", lambda _role, _url: log)  # noqa: B010

    # Identity of a process, and whether it runs.
    def of_this_process(cls: type[identity.Identity]) -> identity.Identity:
        return identity.Identity("node", "boot", "namespace", SIM.now.here.number, 1)

    def is_running(self: identity.Identity) -> bool:
        return any(p.number == self.pid and p.alive and not p.killed for p in current().processes)

    identity.Identity.of_this_process = classmethod(of_this_process)  # type: ignore[method-assign,assignment]
    identity.Identity.is_running = is_running  # type: ignore[method-assign]

    # Close the sockets and locks of a dead process, as the kernel would, and ignore its later calls.
    channel_init, channel_close = ipc.Channel.__init__, ipc.Channel.close
    listener_init, listener_close = ipc.Listener.__init__, ipc.Listener.close

    def init_channel(self: ipc.Channel, connection: object) -> None:
        channel_init(self, connection)  # type: ignore[arg-type]

        def end() -> None:
            self.closed = True
            self._socket.close()

        SIM.now.here.held.append(end)

    def close_channel(self: ipc.Channel) -> None:
        if SIM.now.unwinding is None:
            channel_close(self)
        else:
            self.closed = True
            self._socket.close()

    def init_listener(self: ipc.Listener, path: Path) -> None:
        listener_init(self, path)
        SIM.now.here.held.append(self._socket.close)

    def close_listener(self: ipc.Listener) -> None:
        if SIM.now.unwinding is None:
            listener_close(self)

    ipc.Channel.__init__, ipc.Channel.close = init_channel, close_channel  # type: ignore[method-assign]
    ipc.Listener.__init__, ipc.Listener.close = init_listener, close_listener  # type: ignore[method-assign]
    instance_release = InstanceLease.release

    def release(self: InstanceLease, *, keep_directory: bool) -> None:
        if SIM.now.unwinding is None:
            instance_release(self, keep_directory=keep_directory)
        else:
            os.close(self._fd)

    InstanceLease.release = release  # type: ignore[method-assign]
    ring_hold = Ring.hold

    def hold(self: Ring, attempt: int) -> None:
        SIM.now.check_alive()
        ring_hold(self, attempt)
        SIM.now.here.held.append(self.release)

    Ring.hold = hold  # type: ignore[method-assign]
    for owner, names in (
        (
            Ring,
            (
                "mark_filling",
                "mark_full",
                "set_attempt",
                "remove_checkpoint",
                "_write",
                "allocate",
                "add_slots",
            ),
        ),
    ):
        for name in names:
            _only_alive(owner, name)
    _only_alive(Progress, "_append")

    def emit(self: EventLog, event: str, fields: object = None, *, step: int | None = None) -> None:
        sim = SIM.now
        if sim.tracing and sim.unwinding is None:
            where = "" if step is None else f" step {step}"
            sim.note(f"    {sim.here.name}: {event}{where} {str(fields or '')[:160]}")

    EventLog.emit = emit  # type: ignore[method-assign]
    remove = Ring.remove

    def remove_ring(directory: Path, *, keep_doubts: bool = False) -> None:
        SIM.now.check_alive()
        remove(directory, keep_doubts=keep_doubts)
        current().checks.ring_changed = True

    Ring.remove = staticmethod(remove_ring)  # type: ignore[method-assign]
    gc.collect()
    gc.freeze()  # later collections, once per some seeds, then look only at objects that the seeds made
    gc.disable()


def prepare_tcp() -> None:
    """Also load the code for ranks over TCP, and replace its access to the operating system. Call once per process."""
    global _tcp_is_prepared  # noqa: PLW0603
    prepare()
    if _tcp_is_prepared:
        return
    _tcp_is_prepared = True
    import stager.service
    import stager.standing
    from holdfast.ring.ring_keeper import RingKeeper
    from tests.simulation import tcp_checks, tcp_network, tcp_world

    assert tcp_world is not None
    install()
    tcp_network.install_network()
    tcp_checks.watch_ports()
    # No check covers `holdfast status`, metrics, traces or MPI's shared memory.
    for name in ("serve_status", "serve_metrics", "export_spans"):
        setattr(stager.service, name, lambda *_, **__: contextlib.nullcontext())
    setattr(stager.service, "SegmentList", lambda _: io.BytesIO())  # noqa: B010
    keeper_hold = RingKeeper._lock_file

    def hold(self: RingKeeper) -> int:
        fd = keeper_hold(self)

        def let_go() -> None:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

        SIM.now.here.held.append(let_go)
        return fd

    RingKeeper._lock_file = hold  # type: ignore[method-assign]
    gc.collect()
    gc.freeze()


def _only_alive(owner: type, name: str) -> None:
    before = getattr(owner, name)

    def guarded(*args: object, **kwargs: object) -> object:
        SIM.now.check_alive()
        return before(*args, **kwargs)

    setattr(owner, name, guarded)


def run_seed(seed: int, *, trace: bool = False, tcp: bool = False) -> Outcome:
    """Play one seed, over MPI or over TCP."""
    prepare_tcp() if tcp else prepare()
    assert _base is not None
    from tests.simulation.world import World

    made: type[World] = World
    if tcp:
        from tests.simulation.tcp_world import TcpWorld

        made = TcpWorld

    directory = _base / "room"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    begun = time.perf_counter()
    import random

    random.seed(seed)  # tenacity's jitter
    world = made(seed, directory, trace=trace)
    failure = ""
    try:
        world.run()
    except AssertionError as error:
        failure = f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - a simulation that breaks is a finding, too
        import traceback

        failure = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    if next(_numbers) % 20 == 0:
        gc.collect()
    return Outcome(
        seed,
        failure,
        world.scheduler.events,
        time.perf_counter() - begun,
        [_plain(line) for line in world.scheduler.trace],
        str(world.plan),
    )


def _plain(line: str) -> str:
    """Replace values chosen by the kernel, so that the same seed gives the same trace, to the letter."""
    return _KERNEL_CHOSE.sub(r"\1N", line.replace(str(_base), "/dev/shm/sim"))


def clean_up() -> None:
    """Remove the files in shared memory."""
    if _base is not None:
        shutil.rmtree(_base, ignore_errors=True)
