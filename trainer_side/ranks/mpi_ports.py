"""The ports of an MPI job: messages and payloads between a rank and its stager, and messages among the ranks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import ClassVar

from holdfast.errors import PeerLost, ProtocolError
from holdfast.wire.frames import CONTROL_TAG, MAX_MESSAGE_BYTES, Kind, data_tag, encode, payload_message_count
from trainer_side.ranks.mpi import LOST, MPI, PAUSE_SECONDS, lost_peer

_log = logging.getLogger("holdfast.trainer.mpi")


class MpiStagerPort:
    """The `StagerPort` of an MPI job. One thread at a time."""

    has_threads = False
    # Whether a stager has timed out. MPI may still count it as alive, and MPI_Finalize would wait for it.
    any_timed_out: ClassVar[bool] = False

    def __init__(self, control: MPI.Intracomm, stager: int) -> None:
        self._comm, self._stager = control, stager
        self._sending: list[tuple[MPI.Request, bytes]] = []
        self._payloads: dict[int, tuple[list[MPI.Request], memoryview]] = {}
        self._next_payload = 0
        # Receive buffer, reused: fresh memory for a large message costs more than its copy.
        self._received = bytearray()
        self._has_disconnected = False

    @property
    def one_machine(self) -> bool:
        """Whether all processes of the job are on one machine, by mpirun's variables."""
        local = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
        return local is not None and local == os.environ.get("OMPI_COMM_WORLD_SIZE")

    @property
    def processes_per_core(self) -> float:
        """Processes of the job per core of this machine; 0 if mpirun does not tell."""
        # All cores, not those that this rank is bound to: the processes share all of them.
        return int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "0")) / (os.cpu_count() or 1)

    def send(self, message: bytes) -> None:
        try:
            self._sending.append((self._comm.Isend([message, MPI.BYTE], self._stager, CONTROL_TAG), message))
        except MPI.Exception as error:
            raise lost_peer(error) from error

    def send_payload(self, payload: memoryview, slot: int, pieces: Sequence[int]) -> int:
        requests: list[MPI.Request] = []
        begin = 0
        try:
            for nbytes in pieces if payload_message_count(len(pieces)) > 1 else (len(payload),):
                part = payload[begin : begin + nbytes]
                requests.append(self._comm.Isend([part, MPI.BYTE], self._stager, data_tag(slot)))
                begin += nbytes
        except MPI.Exception as error:
            raise lost_peer(error) from error
        self._next_payload += 1
        self._payloads[self._next_payload] = (requests, payload)
        return self._next_payload

    def is_sent(self, handle: int) -> bool:
        try:
            done = MPI.Request.Testall(self._payloads[handle][0])
        except MPI.Exception as error:
            raise lost_peer(error) from error
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
            raise lost_peer(error) from error
        return messages

    def disconnect(self, seconds_max: float, *, lost: bool = False) -> None:
        """As `StagerPort.disconnect`. With `lost`, MPI is not finalized at exit."""
        MpiStagerPort.any_timed_out |= lost
        if self._has_disconnected:
            return
        self._has_disconnected = True
        deadline = time.monotonic() + seconds_max
        try:
            self.send(encode(Kind.BYE))
            while (self._sending or self._payloads) and time.monotonic() < deadline:
                self.poll()
                for handle in list(self._payloads):
                    self.is_sent(handle)
                time.sleep(PAUSE_SECONDS)
        except (PeerLost, ProtocolError) as error:
            _log.debug("left without a good-bye: %s", error)


class MpiCouncilPort:
    """Messages among the trainers (`trainer_side.tiers.commit_votes`). One thread at a time.

    Messages to a rank that MPI reports dead are dropped. Without fault tolerance MPI reports none, and deadlines apply.
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
            self._acknowledge_failures(error, rank)
        else:
            self._sending.append((request, message, rank))

    def poll(self) -> list[tuple[int, bytes]]:
        """As `RanksPort.poll`. PeerLost: MPI failed, and not because a rank is dead."""
        found: list[tuple[int, bytes]] = []
        status = MPI.Status()
        try:
            while self._comm.Iprobe(MPI.ANY_SOURCE, CONTROL_TAG, status):
                source = status.Get_source()
                buffer = bytearray(status.Get_count(MPI.BYTE))
                self._comm.Recv([buffer, MPI.BYTE], source, CONTROL_TAG)
                found.append((source, bytes(buffer)))
        except MPI.Exception as error:
            self._acknowledge_failures(error)
        in_flight = []
        for request, message, rank in self._sending:
            try:
                if not request.Test() and rank not in self._lost:
                    in_flight.append((request, message, rank))
            except MPI.Exception as error:
                self._acknowledge_failures(error, rank)
        self._sending = in_flight
        return found

    def lost_ranks(self) -> frozenset[int]:
        return self._lost

    def flush(self, seconds_max: float) -> None:
        deadline = time.monotonic() + seconds_max
        while self._sending and time.monotonic() < deadline:
            self.poll()
            time.sleep(PAUSE_SECONDS)

    def _acknowledge_failures(self, error: MPI.Exception, rank: int | None = None) -> None:
        """Acknowledge dead ranks, so that ANY_SOURCE probes work again."""
        if error.Get_error_class() not in LOST:
            raise lost_peer(error, "a training rank") from error
        try:
            self._comm.Ack_failed(self._comm.size)
            failed = self._comm.Get_failed()
            dead = failed.Translate_ranks(None, self._comm.Get_group())
        except (NotImplementedError, MPI.Exception):
            raise lost_peer(error, "a training rank") from error
        self._lost |= frozenset(int(one) for one in dead if one >= 0) | (
            {rank} if rank is not None else set()
        )
