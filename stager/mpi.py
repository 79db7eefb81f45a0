"""All MPI calls of the stager; the only file of this package that imports `mpi4py.MPI` (importing it starts MPI).

    MpiTrainersPort.join()   collective at start-up: exchange of roles; two communicators of our own
    MpiTrainersPort          control messages from and to every trainer, payloads straight into the ring, dead trainers
    MpiStagers               this stager's share; sends the attempt from the first stager to the others

Rules: errors are returned, never abort; no call blocks or spins; a receive is posted before its credit is sent, so
every payload has a posted receive. Under ULFM (`mpirun --with-ft ulfm`) a dead trainer appears as an error of the
probe; the stager acknowledges it and continues with the others. One thread only.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence

import mpi4py
import numpy as np

from holdfast.errors import ConfigError, HoldfastError, PeerLost, ProtocolError
from holdfast.image.entries import Extent
from holdfast.image.shares import WRITERS_MAX, ShareNumber
from holdfast.process import FINALIZE_SECONDS_MAX, call_or_exit
from holdfast.wire import frames as wire
from holdfast.wire.frames import CONTROL_TAG, MAX_MESSAGE_BYTES, Kind, Role, data_tag, payload_message_count
from stager.trainers_port import PollResult

mpi4py.rc.thread_level = "serialized"  # one thread of this process talks to MPI
mpi4py.rc.finalize = False  # MPI_Finalize waits for dead processes, so `_finalize` decides at exit
from mpi4py import MPI  # noqa: E402

_log = logging.getLogger("holdfast.stager.mpi")

_LOST = frozenset({MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED})
_PAUSE_SECONDS = 2e-3
_END_PAUSE_SECONDS = 5e-3
_CANCEL_POLLS = 100
_DATATYPES_KEPT = 65_536
_MESSAGES_PER_POLL_MAX = 256  # so that a rank that sends without pause does not delay payloads


def _finalize() -> None:
    """Finalize MPI at exit, unless a process of the job is dead; mpi_world.py does the same."""
    if not MPI.Is_initialized() or MPI.Is_finalized():
        return
    world = MPI.COMM_WORLD
    world.Set_errhandler(MPI.ERRORS_RETURN)
    try:
        everyone = world.Iagree(np.ones(1, np.int32))
        while not everyone.Test():  # trainers may continue to work after their last checkpoint
            if world.Is_revoked():  # a trainer has ended without waiting for the others
                return
            time.sleep(_END_PAUSE_SECONDS)
    except MPI.Exception:
        return
    except NotImplementedError:
        pass
    call_or_exit(FINALIZE_SECONDS_MAX, ctypes.CDLL(MPI.__file__).MPI_Finalize, "MPI_Finalize")


atexit.register(_finalize)


class MpiStagers:
    """The job's stagers; the order of their world ranks is that of their shares. Main thread.

    Attributes:
        share: The share of this stager. The first stager leads: its flusher chooses the attempt of the job.
    """

    def __init__(self, stagers: MPI.Comm) -> None:
        self._comm = stagers
        self.share = ShareNumber(stagers.rank, stagers.size)
        self._pending_sends: list[tuple[MPI.Request, bytes]] = []

    def send_attempt(self, attempt: int | HoldfastError) -> None:
        """Send the others the attempt, or the error that replaces it. Only the lead sends."""
        if not self.share.is_lead:
            return
        if isinstance(attempt, HoldfastError):
            message = wire.encode(Kind.REFUSED, body=wire.error_body(attempt))
        else:
            message = wire.encode(Kind.WELCOME, attempt=attempt)
        for other in range(1, self.share.writers):
            try:
                self._pending_sends.append(
                    (self._comm.Isend([message, MPI.BYTE], other, CONTROL_TAG), message)
                )
            except MPI.Exception as error:  # that stager is dead; the ranks notice, too
                _log.debug("stager %d/%d is not told: %s", other + 1, self.share.writers, error)

    def receive_attempt(self, seconds_max: float) -> int:
        """Wait for the attempt that the first stager sends; 0 on the first stager itself.

        Raises:
            PeerLost: The first stager is dead, or has sent nothing within `seconds_max`.
            HoldfastError: The first stager could not start; an error of the same class.
        """
        if self.share.is_lead:
            return 0
        status, deadline = MPI.Status(), time.monotonic() + seconds_max
        try:
            while not self._comm.Iprobe(0, CONTROL_TAG, status):
                if time.monotonic() > deadline:
                    raise PeerLost(
                        f"the stager of share {self.share} waited {seconds_max:g} s for the first stager of the job to "
                        "name the attempt; look at its log"
                    )
                time.sleep(_PAUSE_SECONDS)
            buffer = bytearray(status.Get_count(MPI.BYTE))
            self._comm.Recv([buffer, MPI.BYTE], 0, CONTROL_TAG)
        except MPI.Exception as error:
            raise PeerLost(
                f"the first stager of the job is dead, and the stager of share {self.share} does not know the attempt "
                f"(MPI: {error.Get_error_string()})"
            ) from error
        return _attempt_from_frame(wire.decode(buffer))


def _attempt_from_frame(frame: wire.Frame) -> int:
    if frame.kind is Kind.REFUSED:
        body = wire.json_body(frame, code=str, message=str)
        error = wire.peer_error(body["code"], body["message"])
        raise type(error)(f"the first stager of the job could not start: {error}")
    if frame.kind is not Kind.WELCOME or frame.attempt < 1:
        raise ProtocolError(
            f"the first stager of the job sent {frame.kind.name} of attempt {frame.attempt}, expected WELCOME of an "
            "attempt above 0; install the same holdfast on all machines"
        )
    return frame.attempt


class MpiTrainersPort:
    """The `TrainersPort` of an MPI job. Get one by `join`. `stagers`: the job's stagers, this one included."""

    def __init__(self, control: MPI.Intracomm, trainers: Sequence[int], stagers: MpiStagers) -> None:
        self._comm, self.stagers = control, stagers
        self._world_ranks = list(trainers)
        self._trainer = {world_rank: rank for rank, world_rank in enumerate(trainers)}
        self._lost: set[int] = set()
        self._newly_lost: list[tuple[int, str]] = []
        self._sending: list[tuple[int, MPI.Request, bytes]] = []
        self._receives: dict[tuple[int, int], list[MPI.Request]] = {}
        self._datatypes: OrderedDict[tuple[Extent, ...], MPI.Datatype] = OrderedDict()
        self.ranks = len(self._world_ranks)

    @classmethod
    def join(cls, seconds_max: float) -> MpiTrainersPort:
        """Exchange roles with the other processes of the job. Collective, once.

        Raises:
            PeerLost: Not all processes joined within `seconds_max`.
            ConfigError: The job has no trainer, or too many stagers.
        """
        world = MPI.COMM_WORLD
        world.Set_errhandler(MPI.ERRORS_RETURN)
        mine = np.array([Role.STAGER], dtype=np.int32)
        roles = np.zeros(world.size, dtype=np.int32)
        request = world.Iallgather(mine, roles)
        deadline = time.monotonic() + seconds_max
        while not request.Test():
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"stager: not all {world.size} processes joined within {seconds_max:g} s; look whether every "
                    "trainer makes a Checkpointer"
                )
            time.sleep(_PAUSE_SECONDS)
        stagers = int(np.count_nonzero(roles == Role.STAGER))
        trainers = np.flatnonzero(roles == Role.TRAINER)
        if stagers > WRITERS_MAX:
            raise ConfigError(
                f"{stagers} stagers in one MPI job, expected at most {WRITERS_MAX}; start fewer"
            )
        control = world.Dup()  # in the same order as trainer_side.ranks.mpi_world.MpiWorld
        control.Set_errhandler(MPI.ERRORS_RETURN)
        among_stagers = world.Split(Role.STAGER, world.rank)
        among_stagers.Set_errhandler(MPI.ERRORS_RETURN)
        if not len(trainers):
            raise ConfigError(
                "no trainer in this MPI job; start the stager with mpirun -n N TRAINER : -n 1 holdfast stager"
            )
        return cls(control, trainers.tolist(), MpiStagers(among_stagers))

    def fileno(self) -> None:
        """None: MPI has no descriptor to wait for."""

    def mark_left(self, rank: int) -> None:
        """Do nothing: MPI distinguishes a process that has left from one that died."""

    # -- control messages ----------------------------------------------------------------------------------------

    def send(self, rank: int, message: bytes) -> None:
        if rank in self._lost:
            return
        try:
            request = self._comm.Isend([message, MPI.BYTE], self._world_ranks[rank], CONTROL_TAG)
            self._sending.append((rank, request, message))
        except MPI.Exception as error:
            self._mark_lost(rank, error)

    def poll(self) -> PollResult:
        result = PollResult()
        status = MPI.Status()
        while len(result.messages) < _MESSAGES_PER_POLL_MAX:
            try:
                if not self._comm.Iprobe(MPI.ANY_SOURCE, CONTROL_TAG, status):
                    break
            except MPI.Exception as error:
                if not self._acknowledge(error):
                    break
                continue  # messages that a dead rank sent before are still pending
            self._receive(result, status)
        sending, self._sending = self._sending, []
        for rank, request, message in sending:
            try:
                if not request.Test():
                    self._sending.append((rank, request, message))
            except MPI.Exception as error:
                self._mark_lost(rank, error)
        result.lost, self._newly_lost = self._newly_lost, []
        return result

    @property
    def unsent(self) -> bool:
        return any(rank not in self._lost for rank, _, _ in self._sending)

    def unsent_to(self, rank: int) -> int:
        return 0 if rank in self._lost else sum(to == rank for to, _, _ in self._sending)

    def _receive(self, result: PollResult, status: MPI.Status) -> None:
        source, nbytes = status.Get_source(), status.Get_count(MPI.BYTE)
        rank = self._trainer.get(source)
        if rank is None or not 0 <= nbytes <= MAX_MESSAGE_BYTES:
            # Matched and never received: the message leaves the queue and takes no memory here.
            self._comm.Improbe(source, CONTROL_TAG)
            if rank is not None:
                self.drop(
                    rank, f"sent a control message of {nbytes} bytes, expected at most {MAX_MESSAGE_BYTES}"
                )
            return
        buffer = bytearray(nbytes)
        try:
            self._comm.Recv([buffer, MPI.BYTE], source, CONTROL_TAG)
        except MPI.Exception as error:
            self._mark_lost(rank, error)
            return
        result.messages.append((rank, bytes(buffer)))

    # -- payloads ------------------------------------------------------------------------------------------------

    def post(self, rank: int, slot: int, memory: memoryview, pieces: tuple[Extent, ...]) -> None:
        """Post the receive of `pieces` (offsets within `memory`, the slot) from `rank`; then send it the credit."""
        world_rank = self._world_ranks[rank]
        targets: list[list[object]] = [[memory[piece.offset : piece.end], MPI.BYTE] for piece in pieces]
        if payload_message_count(len(pieces)) < len(pieces):
            targets = [[memory, 1, self._datatype(pieces)]]
        requests: list[MPI.Request] = []
        self._receives[rank, slot] = requests
        try:
            # extend() appends one by one, so `cancel` withdraws the receives posted before a failure.
            requests.extend(self._comm.Irecv(target, world_rank, data_tag(slot)) for target in targets)
        except MPI.Exception as error:
            self.cancel(rank, slot)
            self._mark_lost(rank, error)

    def pop_received(self, rank: int, slot: int) -> int | None:
        requests = self._receives.get((rank, slot))
        if requests is None:
            return None
        statuses = [MPI.Status() for _ in requests]
        try:
            if not MPI.Request.Testall(requests, statuses):
                return None
        except MPI.Exception as error:
            self.cancel(rank, slot)
            self._mark_lost(rank, error, statuses)
            return None
        del self._receives[rank, slot]
        return sum(int(status.Get_elements(MPI.BYTE)) for status in statuses)

    def cancel(self, rank: int, slot: int) -> None:
        """Withdraw a posted receive whose payload will not come."""
        for request in self._receives.pop((rank, slot), []):
            if not _cancel_receive(request):
                _log.warning("the MPI receive from rank %d into slot %d could not be withdrawn", rank, slot)

    def _datatype(self, pieces: tuple[Extent, ...]) -> MPI.Datatype:
        found = self._datatypes.get(pieces)
        if found is None:
            found = MPI.BYTE.Create_hindexed([p.nbytes for p in pieces], [p.offset for p in pieces]).Commit()
            self._datatypes[pieces] = found
            if len(self._datatypes) > _DATATYPES_KEPT:
                _, oldest = self._datatypes.popitem(last=False)
                oldest.Free()  # receives that use it keep it alive
        return found

    # -- who is dead ---------------------------------------------------------------------------------------------

    def drop(self, rank: int, reason: str) -> None:
        """Count a trainer as lost: `poll` reports it once, and no more messages are sent to it."""
        if rank not in self._lost:
            self._lost.add(rank)
            self._newly_lost.append((rank, f"rank {rank} {reason}"))

    def _mark_lost(self, rank: int, error: MPI.Exception, statuses: Sequence[MPI.Status] = ()) -> None:
        classes = {error.Get_error_class()}
        if MPI.ERR_IN_STATUS in classes:  # several requests: each status has its own error
            classes |= {MPI.Get_error_class(status.Get_error()) for status in statuses}
        if classes & _LOST:
            self.drop(rank, "is dead")
        else:
            self.drop(rank, f"cannot be reached (MPI: {error.Get_error_string()})")

    def _acknowledge(self, error: MPI.Exception) -> bool:
        """Acknowledge dead processes: until then every probe raises. False if no trainer was newly found dead."""
        if error.Get_error_class() not in _LOST:
            raise PeerLost(f"stager: MPI failed while polling: {error.Get_error_string()}") from error
        before = len(self._lost)
        self._comm.Ack_failed()
        failed = self._comm.Get_failed()
        world_ranks = MPI.Group.Translate_ranks(failed, list(range(failed.size)), self._comm.group)
        for world_rank in world_ranks:
            if world_rank in self._trainer:
                self.drop(self._trainer[world_rank], "is dead")
        failed.Free()
        return len(self._lost) > before


def _cancel_receive(request: MPI.Request) -> bool:
    """Cancel a receive; False if it does not end."""
    if request == MPI.REQUEST_NULL:
        return True
    try:
        request.Cancel()
        return any(request.Test() for _ in range(_CANCEL_POLLS))
    except MPI.Exception as error:
        # A receive from a dead process completes with this error, so it is withdrawn.
        _log.debug("cancelled receive: %s", error)
        return True
