"""All MPI calls of a training rank; the only file of this package that imports `mpi4py.MPI` (importing it starts MPI).

    World.join()   once per process, collective: who is a trainer, who the stager; two communicators of our own
        ├── Port       control messages and payloads to the stager          one thread: the link's
        └── MpiPeers   broadcasts among the trainers, for restore           main thread, before the first step

Rules: errors are returned, never abort (ERRORS_RETURN on each communicator); no blocking call that spins: requests are
polled, with a pause that grows; every wait has a deadline.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Iterable, Sequence
from typing import ClassVar

import mpi4py
import numpy as np

from holdfast.errors import ConfigError, PeerLost, ProtocolError
from holdfast.wire import CONTROL_TAG, MAX_MESSAGE_BYTES, Kind, Role, data_tag, encode

# The link's thread talks to MPI while the main thread may do so too (restore, or the user's own communicators).
mpi4py.rc.thread_level = "multiple"
# MPI_Finalize waits for dead processes, now and then for ever: whether to call it is decided at exit (`_finalize`).
mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402

__all__ = ["MpiPeers", "Port", "World"]

_log = logging.getLogger("holdfast.trainer.mpi")

_START_SECONDS_MAX = 120.0
_LEAVE_SECONDS_MAX = 5.0
_EAGER_POLLS = 200  # polls that only yield before a wait begins to sleep: a round trip takes a few of them
_PAUSE_SECONDS_MIN, _PAUSE_SECONDS_MAX = 50e-6, 2e-3
_PIECE_BYTES_MAX = 512 << 20  # MPI counts are 32 bits; well below
_LOST = frozenset({MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED})


def _finalize() -> None:
    """At exit, after everything else here: end MPI, unless a process of the job is dead."""
    if mpi4py.rc.finalize is not False or not MPI.Is_initialized() or MPI.Is_finalized():
        return
    try:
        MPI.COMM_WORLD.Iprobe(MPI.ANY_SOURCE, CONTROL_TAG)  # lets MPI hear of the latest deaths
    except MPI.Exception as error:
        if error.Get_error_class() in _LOST:
            return
    try:
        MPI.COMM_WORLD.Ack_failed()
        someone_is_dead = MPI.COMM_WORLD.Get_failed().Get_size() > 0
    except (MPI.Exception, NotImplementedError):
        someone_is_dead = False  # an MPI without fault tolerance: mpirun ends the job when a process dies
    if not someone_is_dead:
        MPI.Finalize()


atexit.register(_finalize)  # first registered, last called


class World:
    """The MPI job as it was told at start-up. Get it by `join`.

    Attributes:
        rank: This rank among the trainers. `ranks`: how many there are.
        stager: World rank of the stager; None if the job has none.
        local_rank: This rank among the trainers on this machine.
        one_machine: All trainers are on it.
    """

    _joined: ClassVar[World | None] = None

    def __init__(self, seconds_max: float) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise ConfigError(
                "MPI was started without support for threads; import trainer_side before mpi4py.MPI, or set "
                "mpi4py.rc.thread_level = 'multiple'"
            )
        world = MPI.COMM_WORLD
        world.Set_errhandler(MPI.ERRORS_RETURN)
        mine = np.array([Role.TRAINER], dtype=np.int32)
        roles = np.zeros(world.size, dtype=np.int32)
        _wait([world.Iallgather(mine, roles)], seconds_max, "all processes of the MPI job to join holdfast")
        stagers = np.flatnonzero(roles == Role.STAGER)
        if len(stagers) > 1:
            raise ConfigError(
                f"{len(stagers)} stagers in one MPI job, at world ranks {stagers.tolist()}; expected one"
            )
        self.stager = int(stagers[0]) if len(stagers) else None
        # In the same order on every process: the stager takes part in both.
        self._control = world.Dup()
        self._control.Set_errhandler(MPI.ERRORS_RETURN)
        self._trainers = world.Split(Role.TRAINER, world.rank)
        self._trainers.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.ranks = self._trainers.rank, self._trainers.size
        self._port = None if self.stager is None else Port(self._control, self.stager)
        node = self._trainers.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank = node.rank
        self.one_machine = bool(node.size == self.ranks)
        node.Free()

    @classmethod
    def join(cls, seconds_max: float = _START_SECONDS_MAX) -> World:
        """Meet the other processes of the job, the first time; later calls give the same world. Main thread.

        Raises:
            PeerLost: Not all processes joined within `seconds_max`.
            ConfigError: More than one stager, or MPI without threads.
        """
        if cls._joined is None:
            cls._joined = cls(seconds_max)
            atexit.register(cls._joined._leave)
        return cls._joined

    def _leave(self) -> None:
        """At exit: a rank that never got as far as a link must say good-bye as well, or the stager waits for it."""
        if self._port is not None:
            self._port.leave(_LEAVE_SECONDS_MAX)

    def port(self) -> Port:
        """The way to the stager.

        Raises:
            ConfigError: The job has none.
        """
        if self._port is None:
            raise ConfigError(
                f"no stager in this MPI job of {self.ranks} trainers; add `: -n 1 holdfast stager --store URL` to the "
                "mpirun line"
            )
        return self._port

    def peers(self) -> MpiPeers:
        """The way to the other trainers."""
        return MpiPeers(self._trainers)


class Port:
    """Messages and payloads to and from the stager. One thread at a time.

    Every method raises `PeerLost` when MPI says that the stager is dead.
    """

    def __init__(self, control: MPI.Intracomm, stager: int) -> None:
        self._comm, self._stager = control, stager
        self._sending: list[tuple[MPI.Request, bytes]] = []
        self._payloads: dict[int, tuple[MPI.Request, memoryview]] = {}
        self._next_payload = 0
        self._left = False

    def send(self, message: bytes) -> None:
        """Send a control message; the order is kept."""
        try:
            self._sending.append((self._comm.Isend([message, MPI.BYTE], self._stager, CONTROL_TAG), message))
        except MPI.Exception as error:
            raise _lost(error) from error

    def send_payload(self, payload: memoryview, slot: int) -> int:
        """Begin to send the bytes of one credit. Returns a handle; they must not change until `sent(handle)`."""
        try:
            request = self._comm.Isend([payload, MPI.BYTE], self._stager, data_tag(slot))
        except MPI.Exception as error:
            raise _lost(error) from error
        self._next_payload += 1
        self._payloads[self._next_payload] = (request, payload)
        return self._next_payload

    def sent(self, handle: int) -> bool:
        """Whether MPI has read a payload to its end."""
        try:
            done = self._payloads[handle][0].Test()
        except MPI.Exception as error:
            raise _lost(error) from error
        if done:
            del self._payloads[handle]
        return done

    def poll(self) -> list[bytes]:
        """All control messages that have come. Never waits."""
        messages: list[bytes] = []
        status = MPI.Status()
        try:
            while self._comm.Iprobe(self._stager, CONTROL_TAG, status):
                nbytes = status.Get_count(MPI.BYTE)
                if not 0 <= nbytes <= MAX_MESSAGE_BYTES:
                    raise ProtocolError(
                        f"stager: control message of {nbytes} bytes, expected at most {MAX_MESSAGE_BYTES}"
                    )
                buffer = bytearray(nbytes)
                self._comm.Recv([buffer, MPI.BYTE], self._stager, CONTROL_TAG)
                messages.append(bytes(buffer))
            self._sending = [(request, message) for request, message in self._sending if not request.Test()]
        except MPI.Exception as error:
            raise _lost(error) from error
        return messages

    def leave(self, seconds_max: float) -> None:
        """Say BYE, once, and wait until all that was to be sent has left. A stager that is dead is not waited for."""
        if self._left:
            return
        self._left = True
        deadline = time.monotonic() + seconds_max
        try:
            self.send(encode(Kind.BYE))
            while (self._sending or self._payloads) and time.monotonic() < deadline:
                self.poll()
                for handle in list(self._payloads):
                    self.sent(handle)
                time.sleep(_PAUSE_SECONDS_MIN)
        except (PeerLost, ProtocolError) as error:
            _log.debug("left without a good-bye: %s", error)


class MpiPeers:
    """What restore needs of the other training ranks. Main thread, before the first step; all calls are collective.

    Attributes:
        rank: This rank. `ranks`: how many there are.
    """

    def __init__(self, trainers: MPI.Comm, *, seconds_max: float = 600.0) -> None:
        self._comm = trainers
        self._seconds_max = seconds_max
        self._shared: list[tuple[MPI.Request, MPI.Datatype]] = []
        self.rank, self.ranks = trainers.rank, trainers.size

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        """Give `data` of rank `root` to all; the others pass None.

        Raises:
            PeerLost: A rank is dead or did not come.
        """
        length = np.array([len(data) if data is not None else 0], dtype=np.int64)
        what = f"a broadcast of rank {root}"
        _wait([self._comm.Ibcast([length, MPI.INT64_T], root)], self._seconds_max, what)
        buffer = bytearray(data) if self.rank == root and data is not None else bytearray(int(length[0]))
        view = memoryview(buffer)
        for start in range(0, len(buffer), _PIECE_BYTES_MAX):
            piece = view[start : start + _PIECE_BYTES_MAX]
            _wait([self._comm.Ibcast([piece, MPI.BYTE], root)], self._seconds_max, what)
        return bytes(buffer)

    def all_agree(self, ok: bool) -> bool:
        """Whether every rank said True. Raises `PeerLost` as `broadcast`."""
        mine, all_of_them = np.array([int(ok)], dtype=np.int32), np.zeros(1, dtype=np.int32)
        request = self._comm.Iallreduce([mine, MPI.INT32_T], [all_of_them, MPI.INT32_T], MPI.LAND)
        _wait([request], self._seconds_max, "all ranks to agree")
        return bool(all_of_them[0])

    def share(self, pieces: Sequence[tuple[int, int]], root: int) -> None:
        """Queue a broadcast of scattered memory from `root`; `finish` waits for it. Every rank queues the same ones.

        Args:
            pieces: `(address, nbytes)` of this rank's memory; the sum of bytes is the same on every rank. It must stay
                where it is, and unread (elsewhere: unchanged at `root`), until `finish`.
            root: The rank that has the bytes.
        """
        for group in _groups(pieces, _PIECE_BYTES_MAX):
            sizes, addresses = [nbytes for _, nbytes in group], [address for address, _ in group]
            scattered = MPI.BYTE.Create_hindexed(sizes, addresses).Commit()
            try:
                request = self._comm.Ibcast([MPI.BOTTOM, 1, scattered], root)
            except MPI.Exception as error:
                raise _lost(error, f"rank {root} or another one") from error
            self._shared.append((request, scattered))

    def finish(self, deadline_seconds: float) -> None:
        """Wait until all queued broadcasts are done, at most `deadline_seconds`.

        Raises:
            PeerLost: They were not, or a rank is dead.
        """
        shared, self._shared = self._shared, []
        _wait(
            [request for request, _ in shared],
            deadline_seconds,
            f"{len(shared)} shared pieces of the restore",
        )
        for _, scattered in shared:
            scattered.Free()


def _groups(pieces: Iterable[tuple[int, int]], group_bytes: int) -> list[list[tuple[int, int]]]:
    """Cut pieces into groups of exactly `group_bytes`, the last one less: the same cuts however the pieces differ."""
    groups: list[list[tuple[int, int]]] = []
    room = 0
    for address, nbytes in pieces:
        while nbytes > 0:
            if room == 0:
                groups.append([])
                room = group_bytes
            taken = min(nbytes, room)
            groups[-1].append((address, taken))
            address, nbytes, room = address + taken, nbytes - taken, room - taken
    return groups


def _wait(requests: list[MPI.Request], seconds_max: float, what: str) -> None:
    """Poll until all are complete. Raises `PeerLost` at the deadline or when a process is dead."""
    deadline = time.monotonic() + seconds_max
    pause_seconds, polls = _PAUSE_SECONDS_MIN, 0
    try:
        while not MPI.Request.Testall(requests):
            polls += 1
            if polls <= _EAGER_POLLS:
                time.sleep(0)  # gives the GIL and the core to whoever is behind
                continue
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"waited {seconds_max:g} s for {what}; a process is stopped, slow, or not a part of it"
                )
            time.sleep(pause_seconds)
            pause_seconds = min(_PAUSE_SECONDS_MAX, pause_seconds * 1.5)
    except MPI.Exception as error:
        raise _lost(error, f"a process was lost while waiting for {what}") from error


def _lost(error: MPI.Exception, who: str = "the stager") -> PeerLost:
    if error.Get_error_class() in _LOST:
        return PeerLost(f"{who}: its process is dead (MPI: {error.Get_error_string()})")
    return PeerLost(f"{who}: MPI failed: {error.Get_error_string()}")
