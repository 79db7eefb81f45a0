"""All MPI calls of a training rank; the only file of this package that imports `mpi4py.MPI` (importing it starts MPI).

    World.join()   once per process, collective: who is a trainer, who the stager; three communicators of our own
        ├── Port         control messages and payloads to the stager        one thread: the link's
        ├── CouncilPort  messages among the trainers, for local tiers       one thread: the council's
        └── MpiPeers     bytes among the trainers, for restore              main thread, before the first step

Rules: errors are returned, never abort (ERRORS_RETURN on each communicator); no blocking call that spins: requests are
polled, with a pause that grows; every wait has a deadline.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import mpi4py
import numpy as np

from holdfast.errors import ConfigError, PeerLost, ProtocolError
from holdfast.process import FINALIZE_SECONDS_MAX, end_within
from holdfast.wire.frames import (
    CONTROL_TAG,
    MAX_MESSAGE_BYTES,
    Kind,
    Role,
    data_tag,
    encode,
    payload_messages,
)

# The link's thread talks to MPI while the main thread may do so too (restore, or the user's own communicators).
mpi4py.rc.thread_level = "multiple"
# MPI_Finalize waits for dead processes, now and then for ever: whether to call it is decided at exit (`_finalize`).
mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402

_log = logging.getLogger("holdfast.trainer.mpi")

_START_SECONDS_MAX = 120.0
_LEAVE_SECONDS_MAX = 5.0
_END_PAUSE_SECONDS = 5e-3
_FAILED_SECONDS = 3.0  # so long a rank that failed waits for the others to end as well
_REVOKE_POLLS = 40
_EAGER_POLLS = 200  # polls that only yield before a wait begins to sleep: a round trip takes a few of them
_PAUSE_SECONDS_MIN, _PAUSE_SECONDS_MAX = 50e-6, 2e-3
_PIECE_BYTES_MAX = 512 << 20  # MPI counts are 32 bits; well below
_WHOLE_BYTES_MIN = 128 << 10  # from here on a piece is a message of its own
_PARCEL_TAG = 1
_LOST = frozenset({MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED})


_given_up = (
    False  # the stager was silent for too long: for MPI it may still live, and MPI_Finalize would wait for it
)


def _finalize() -> None:
    if mpi4py.rc.finalize is not False or not MPI.Is_initialized() or MPI.Is_finalized() or _given_up:
        return
    # With an exception that nobody caught: the others may still work, and wait for this rank in a collective call of
    # their own. Who waits for them without end hangs the job; who ends is seen.
    failed = hasattr(sys, "last_value")
    if failed and World.joined() is None:
        return  # nobody has met anybody yet
    deadline = time.monotonic() + _FAILED_SECONDS if failed else math.inf
    world = MPI.COMM_WORLD
    world.Set_errhandler(MPI.ERRORS_RETURN)
    try:
        # Not a look at who is dead now: one that dies while others are in MPI_Finalize would keep them there. All come
        # to the same answer here, or to the same error when one of them is gone.
        everyone = world.Iagree(np.ones(1, np.int32))
        while not everyone.Test():  # as long as the others have work to do: so would MPI_Finalize wait
            if world.Is_revoked():
                return
            if time.monotonic() > deadline:
                world.Revoke()  # a process that ends by itself is not seen as dead: this is what the others see
                for _ in range(_REVOKE_POLLS):
                    everyone.Test()
                    time.sleep(_END_PAUSE_SECONDS)
                return
            time.sleep(_END_PAUSE_SECONDS)
    except MPI.Exception:
        return
    except NotImplementedError:  # an MPI without fault tolerance: mpirun ends the job when a process dies
        if failed:
            return
    code = getattr(sys.last_value, "exit_code", 1) if failed else 0
    end_within(FINALIZE_SECONDS_MAX, ctypes.CDLL(MPI.__file__).MPI_Finalize, "MPI_Finalize", code=code)


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
        self._council = self._trainers.Dup()
        self._council.Set_errhandler(MPI.ERRORS_RETURN)
        self._uncaught = self._trainers.Dup()
        self._uncaught.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.ranks = self._trainers.rank, self._trainers.size
        self._port = None if self.stager is None else MpiStagerPort(self._control, self.stager)
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

    @classmethod
    def joined(cls) -> World | None:
        """The world, if this process has met the others."""
        return cls._joined

    def _leave(self) -> None:
        """At exit: a rank that never got as far as a link must say good-bye as well, or the stager waits for it."""
        if self._port is not None:
            self._port.leave(_LEAVE_SECONDS_MAX)

    def port(self) -> MpiStagerPort:
        """The way to the stager.

        Raises:
            ConfigError: The job has none.
        """
        if self._port is None:
            raise ConfigError(
                f"no stager in this MPI job of {self.ranks} trainers; add `: -n 1 holdfast stager --store URL` to the "
                'mpirun line, or set tiers (HOLDFAST_TIERS="memory,nvme:/mnt/nvme0") and store to keep checkpoints in '
                "local tiers"
            )
        return self._port

    def peers(self) -> MpiPeers:
        """The way to the other trainers."""
        return MpiPeers(self._trainers)

    def council(self) -> MpiCouncilPort:
        """The way to the other trainers for local tiers, at any time."""
        return MpiCouncilPort(self._council)

    def uncaught(self) -> MpiCouncilPort:
        """The way to the other trainers for an error that ends this one."""
        return MpiCouncilPort(self._uncaught)


class MpiStagerPort:
    """Messages and payloads to and from the stager. One thread at a time.

    Every method raises `PeerLost` when MPI says that the stager is dead.
    """

    def __init__(self, control: MPI.Intracomm, stager: int) -> None:
        self._comm, self._stager = control, stager
        self._sending: list[tuple[MPI.Request, bytes]] = []
        self._payloads: dict[int, tuple[list[MPI.Request], memoryview]] = {}
        self._next_payload = 0
        # For messages as they come: fresh memory for each large one costs more than its copy.
        self._received = bytearray()
        self._left = False

    @property
    def one_machine(self) -> bool:
        """Whether mpirun says that all processes of the job are on one machine."""
        local = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
        return local is not None and local == os.environ.get("OMPI_COMM_WORLD_SIZE")

    @property
    def crowding(self) -> float:
        """Processes of the job on this machine for each of its cores, as far as mpirun tells; 0 where it does not."""
        # Not the cores that this rank is bound to: others share the rest of them.
        return int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "0")) / (os.cpu_count() or 1)

    def send(self, message: bytes) -> None:
        try:
            self._sending.append((self._comm.Isend([message, MPI.BYTE], self._stager, CONTROL_TAG), message))
        except MPI.Exception as error:
            raise _lost(error) from error

    def send_payload(self, payload: memoryview, slot: int, pieces: Sequence[int]) -> int:
        """Begin to send the bytes of one credit. Returns a handle; they must not change until `sent(handle)`.

        Args:
            payload: The frame.
            slot: As the credit says.
            pieces: Sizes of the frame's pieces, whose sum is its size.
        """
        requests: list[MPI.Request] = []
        begin = 0
        try:
            for nbytes in pieces if payload_messages(len(pieces)) > 1 else (len(payload),):
                part = payload[begin : begin + nbytes]
                requests.append(self._comm.Isend([part, MPI.BYTE], self._stager, data_tag(slot)))
                begin += nbytes
        except MPI.Exception as error:
            raise _lost(error) from error
        self._next_payload += 1
        self._payloads[self._next_payload] = (requests, payload)
        return self._next_payload

    def sent(self, handle: int) -> bool:
        try:
            done = MPI.Request.Testall(self._payloads[handle][0])
        except MPI.Exception as error:
            raise _lost(error) from error
        if done:
            del self._payloads[handle]
        return done

    def poll(self) -> list[bytes]:
        messages: list[bytes] = []
        status = MPI.Status()
        try:
            while self._comm.Iprobe(self._stager, CONTROL_TAG, status):
                nbytes = status.Get_count(MPI.BYTE)
                if not 0 <= nbytes <= MAX_MESSAGE_BYTES:
                    raise ProtocolError(
                        f"the stager sent a control message of {nbytes} bytes, expected at most {MAX_MESSAGE_BYTES}; "
                        "install the same holdfast on all machines"
                    )
                if len(self._received) < nbytes:
                    self._received = bytearray(nbytes)
                view = memoryview(self._received)[:nbytes]
                self._comm.Recv([view, MPI.BYTE], self._stager, CONTROL_TAG)
                messages.append(bytes(view))
            self._sending = [(request, message) for request, message in self._sending if not request.Test()]
        except MPI.Exception as error:
            raise _lost(error) from error
        return messages

    def leave(self, seconds_max: float, *, lost: bool = False) -> None:
        """Say BYE, once, and wait until all that was to be sent has left. A stager that is dead is not waited for; with
        `lost` (it was silent for too long) neither is it when this process ends.
        """
        global _given_up  # noqa: PLW0603 - MPI, too, is one for the process
        _given_up = _given_up or lost
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


class MpiCouncilPort:
    """Messages among the trainers (`trainer_side.tiers.council`). One thread at a time.

    A rank that MPI knows to be dead is left out from then on; where MPI does not tell, deadlines find out.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self.rank, self.ranks = comm.rank, comm.size
        self._sending: list[tuple[MPI.Request, bytes, int]] = []
        self._lost: frozenset[int] = frozenset()

    def send(self, rank: int, message: bytes) -> None:
        if rank in self._lost:
            return
        try:
            request = self._comm.Isend([message, MPI.BYTE], rank, CONTROL_TAG)
        except MPI.Exception as error:
            self._note(error, rank)
        else:
            self._sending.append((request, message, rank))

    def poll(self) -> list[tuple[int, bytes]]:
        """All messages that have come, each with its rank. Never waits.

        Raises:
            PeerLost: MPI failed, and not because a rank is dead.
        """
        found: list[tuple[int, bytes]] = []
        status = MPI.Status()
        try:
            while self._comm.Iprobe(MPI.ANY_SOURCE, CONTROL_TAG, status):
                source = status.Get_source()
                buffer = bytearray(status.Get_count(MPI.BYTE))
                self._comm.Recv([buffer, MPI.BYTE], source, CONTROL_TAG)
                found.append((source, bytes(buffer)))
        except MPI.Exception as error:
            self._note(error)
        under_way = []
        for request, message, rank in self._sending:
            try:
                if not request.Test() and rank not in self._lost:
                    under_way.append((request, message, rank))
            except MPI.Exception as error:
                self._note(error, rank)
        self._sending = under_way
        return found

    def lost(self) -> frozenset[int]:
        return self._lost

    def flush(self, seconds_max: float) -> None:
        """Wait until what was sent has left."""
        deadline = time.monotonic() + seconds_max
        while self._sending and time.monotonic() < deadline:
            self.poll()
            time.sleep(_PAUSE_SECONDS_MIN)

    def _note(self, error: MPI.Exception, rank: int | None = None) -> None:
        """Learn who is dead, and let messages of any rank come again."""
        if error.Get_error_class() not in _LOST:
            raise _lost(error, "a training rank") from error
        try:
            self._comm.Ack_failed(self._comm.size)
            failed = self._comm.Get_failed()
            dead = failed.Translate_ranks(None, self._comm.Get_group())
        except (NotImplementedError, MPI.Exception):
            raise _lost(error, "a training rank") from error
        self._lost |= frozenset(int(one) for one in dead if one >= 0) | (
            {rank} if rank is not None else set()
        )


class MpiPeers:
    """The other training ranks, as restore needs them. Main thread, before the first step.

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

        Large pieces go each by itself: on one machine MPI copies what is in one piece straight from process to process,
        and what is scattered through small buffers, several times slower.

        Args:
            pieces: `(address, nbytes)` of this rank's memory; the sizes are the same on every rank. It must stay
                where it is, and unread (elsewhere: unchanged at `root`), until `finish`.
            root: The rank that has the bytes.
        """
        self._queue(pieces, lambda buffer: self._comm.Ibcast(buffer, root), root)

    def send(self, pieces: Sequence[tuple[int, int]], rank: int) -> None:
        """Queue scattered memory for `rank`; `finish` waits until it has left. It must stay unchanged until then."""
        self._queue(pieces, lambda buffer: self._comm.Isend(buffer, rank, _PARCEL_TAG), rank)

    def receive(self, pieces: Sequence[tuple[int, int]], rank: int) -> None:
        """Queue the receiving of what `rank` sends in pieces of these sizes; `finish` waits for it."""
        self._queue(pieces, lambda buffer: self._comm.Irecv(buffer, rank, _PARCEL_TAG), rank)

    def _queue(
        self, pieces: Sequence[tuple[int, int]], start: Callable[[Any], MPI.Request], rank: int
    ) -> None:
        """The same messages on all ranks that take part: they depend on the sizes alone."""
        small = [piece for piece in pieces if piece[1] < _WHOLE_BYTES_MIN]
        for run in (*([piece] for piece in pieces if piece[1] >= _WHOLE_BYTES_MIN), small):
            for group in _groups(run, _PIECE_BYTES_MAX):
                sizes, addresses = [nbytes for _, nbytes in group], [address for address, _ in group]
                scattered = MPI.BYTE.Create_hindexed(sizes, addresses).Commit()
                try:
                    request = start([MPI.BOTTOM, 1, scattered])
                except MPI.Exception as error:
                    raise _lost(error, f"rank {rank} or another one") from error
                self._shared.append((request, scattered))

    def poll(self) -> None:
        """Move on what was shared. Never waits.

        Raises:
            PeerLost: A rank is dead.
        """
        try:
            MPI.Request.Testsome([request for request, _ in self._shared])
        except MPI.Exception as error:
            raise _lost(error, "a process was lost during the restore") from error
        under_way = []
        for request, scattered in self._shared:
            if request == MPI.REQUEST_NULL:
                scattered.Free()
            else:
                under_way.append((request, scattered))
        self._shared = under_way  # the next look is at these only

    def finish(self, deadline_seconds: float) -> None:
        """Wait until all that was queued is done, at most `deadline_seconds`.

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
                    f"waited {seconds_max:g} s for {what}; a process of the job is stopped, slow, or does not take part"
                )
            time.sleep(pause_seconds)
            pause_seconds = min(_PAUSE_SECONDS_MAX, pause_seconds * 1.5)
    except MPI.Exception as error:
        raise _lost(error, f"a process was lost while waiting for {what}") from error


def _lost(error: MPI.Exception, who: str = "the stager") -> PeerLost:
    if error.Get_error_class() in _LOST:
        return PeerLost(f"{who}: its process is dead (MPI: {error.Get_error_string()})")
    return PeerLost(f"{who}: MPI failed: {error.Get_error_string()}")
