"""Messages among the training ranks over MPI, for the council of the local tiers and for an uncaught error."""

from __future__ import annotations

import time

from holdfast.wire.frames import CONTROL_TAG
from trainer_side.ranks.mpi import LOST, MPI, PAUSE_SECONDS, lost_peer


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
