"""Bytes among the training ranks over MPI, for restore: broadcasts, and tensors from memory to memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from trainer_side.ranks.mpi import MPI, lost_peer, wait
from trainer_side.ranks.peers import COLLECTIVE_SECONDS_MAX, Pieces, divide

_PIECE_BYTES_MAX = 512 << 20  # MPI counts are 32 bits; well below
_PARCEL_TAG = 1


class MpiPeers:
    """The `Peers` of a job of mpirun. Main thread, before the first step."""

    def __init__(self, trainers: MPI.Comm) -> None:
        self._comm = trainers
        self._shared: list[tuple[MPI.Request, MPI.Datatype]] = []
        self.rank, self.ranks = trainers.rank, trainers.size

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        length = np.array([len(data) if data is not None else 0], dtype=np.int64)
        what = f"a broadcast of rank {root}"
        wait([self._comm.Ibcast([length, MPI.INT64_T], root)], COLLECTIVE_SECONDS_MAX, what)
        buffer = bytearray(data) if self.rank == root and data is not None else bytearray(int(length[0]))
        view = memoryview(buffer)
        for start in range(0, len(buffer), _PIECE_BYTES_MAX):
            piece = view[start : start + _PIECE_BYTES_MAX]
            wait([self._comm.Ibcast([piece, MPI.BYTE], root)], COLLECTIVE_SECONDS_MAX, what)
        return bytes(buffer)

    def all_agree(self, ok: bool) -> bool:
        mine, all_of_them = np.array([int(ok)], dtype=np.int32), np.zeros(1, dtype=np.int32)
        request = self._comm.Iallreduce([mine, MPI.INT32_T], [all_of_them, MPI.INT32_T], MPI.LAND)
        wait([request], COLLECTIVE_SECONDS_MAX, "all ranks to agree")
        return bool(all_of_them[0])

    def share(self, pieces: Pieces, root: int) -> None:
        self._queue(pieces, lambda buffer: self._comm.Ibcast(buffer, root), root)

    def send(self, pieces: Pieces, rank: int) -> None:
        self._queue(pieces, lambda buffer: self._comm.Isend(buffer, rank, _PARCEL_TAG), rank)

    def receive(self, pieces: Pieces, rank: int) -> None:
        self._queue(pieces, lambda buffer: self._comm.Irecv(buffer, rank, _PARCEL_TAG), rank)

    def _queue(self, pieces: Pieces, start: Callable[[Any], MPI.Request], rank: int) -> None:
        # On one machine MPI copies contiguous memory straight between processes, but scattered memory through small
        # buffers, several times slower.
        for group in divide(pieces, _PIECE_BYTES_MAX):
            sizes, addresses = [nbytes for _, nbytes in group], [address for address, _ in group]
            scattered = MPI.BYTE.Create_hindexed(sizes, addresses).Commit()
            try:
                request = start([MPI.BOTTOM, 1, scattered])
            except MPI.Exception as error:
                raise lost_peer(error, f"rank {rank} or another one") from error
            self._shared.append((request, scattered))

    def poll(self) -> None:
        try:
            MPI.Request.Testsome([request for request, _ in self._shared])
        except MPI.Exception as error:
            raise lost_peer(error, "a process was lost during the restore") from error
        for _, scattered in (one for one in self._shared if one[0] == MPI.REQUEST_NULL):
            scattered.Free()
        self._shared = [one for one in self._shared if one[0] != MPI.REQUEST_NULL]

    def finish(self, deadline_seconds: float) -> None:
        shared, self._shared = self._shared, []
        what = f"{len(shared)} shared pieces of the restore"
        wait([request for request, _ in shared], deadline_seconds, what)
        for _, scattered in shared:
            scattered.Free()
