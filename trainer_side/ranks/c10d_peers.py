"""Bytes among the training ranks over gloo, for restore: broadcasts, and tensors from memory to memory.

A group of our own needs no default group of torch.distributed, and only restore issues calls in it. gloo waits in its
own threads, and this file keeps the deadlines: at one it cuts every connection of the group, so gloo stops writing to
the caller's memory and the other ranks notice at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    ProcessGroupGloo,
    ReduceOp,
    Store,
    Work,
)

from holdfast.errors import PeerLost
from trainer_side.ranks.deadlines import within
from trainer_side.ranks.peers import COLLECTIVE_SECONDS_MAX, Pieces, divide, poll_until

_PIECE_BYTES_MAX = 16 << 20  # each rank forwards whole messages: smaller ones keep a chain of many ranks busy
_SECONDS_MAX = COLLECTIVE_SECONDS_MAX
_PAUSE_SECONDS_MAX = 2e-3
_NEVER = timedelta(days=365)  # gloo's own timeout of a call: this file keeps the deadlines
_CLOSE_TAG = 0
_CLOSE_SECONDS_MAX = 2.0
_SLACK_SECONDS = 1.0


class _InFlight(NamedTuple):
    """A message in flight: its memory, and the pieces to copy it to when it has arrived."""

    work: Work
    memory: torch.Tensor
    scattered: Pieces


class C10dPeers:
    """The `Peers` of a job without MPI. Main thread, before the first step.

    The ranks find each other's addresses in `store`, which only this group uses. PeerLost: a rank did not connect.
    """

    def __init__(self, store: Store, *, rank: int, ranks: int, start_seconds_max: float) -> None:
        self.rank, self.ranks = rank, ranks
        try:
            # Any: torch's type stubs lack its methods.
            self._group: Any = ProcessGroupGloo(store, rank, ranks, timedelta(seconds=start_seconds_max))
        except RuntimeError as error:
            raise PeerLost(
                f"rank {rank} did not connect to all {ranks} ranks within {start_seconds_max:g} s "
                f"(gloo: {_first_line(error)}); if a rank's address is one that others do not reach, name its "
                "network interface in GLOO_SOCKET_IFNAME"
            ) from error
        self._shared: list[_InFlight] = []
        # Messages between two ranks: gloo cannot poll these, only wait.
        self._direct: list[_InFlight] = []
        self._sent, self._received = [_CLOSE_TAG] * ranks, [_CLOSE_TAG] * ranks

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        what = f"a broadcast of rank {root}"
        length = torch.tensor([len(data) if data is not None else 0], device="cpu")
        self._wait_for(self._broadcast(length, root), what)
        nbytes = int(length[0])
        buffer = bytearray(data) if self.rank == root and data is not None else bytearray(nbytes)
        if nbytes:
            self._wait_for(self._broadcast(torch.frombuffer(buffer, dtype=torch.uint8), root), what)
        return bytes(buffer)

    def all_agree(self, ok: bool) -> bool:
        agreed = torch.tensor([int(ok)], device="cpu")
        options: Any = AllreduceOptions()
        options.reduceOp, options.timeout = ReduceOp.MIN, _NEVER
        self._wait_for(self._group.allreduce([agreed], options), "all ranks to agree")
        return bool(agreed[0])

    def share(self, pieces: Pieces, root: int) -> None:
        for memory, scattered in _messages(pieces, is_sender=self.rank == root):
            self._shared.append(_InFlight(self._broadcast(memory, root), memory, scattered))

    def send(self, pieces: Pieces, rank: int) -> None:
        for memory, _ in _messages(pieces, is_sender=True):
            self._start_direct(self._group.send, memory, (), rank, self._sent)

    def receive(self, pieces: Pieces, rank: int) -> None:
        for memory, scattered in _messages(pieces, is_sender=False):
            self._start_direct(self._group.recv, memory, scattered, rank, self._received)

    def _start_direct(
        self,
        call: Callable[[list[torch.Tensor], int, int], Work],
        memory: torch.Tensor,
        scattered: Pieces,
        rank: int,
        counts: list[int],
    ) -> None:
        counts[rank] += 1
        try:
            work = call([memory], rank, counts[rank])
        except RuntimeError as error:
            raise self._lost_error(f"a message between rank {self.rank} and rank {rank}", error) from error
        self._direct.append(_InFlight(work, memory, scattered))

    def _broadcast(self, memory: torch.Tensor, root: int) -> Work:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = root, 0, _NEVER
        work: Work = self._group.broadcast([memory], options)
        return work

    def poll(self) -> None:
        """Complete the broadcasts that have arrived; gloo needs no poll to move them."""
        in_flight = []
        for message in self._shared:
            if message.work.is_completed():
                self._raise_if_lost(message.work, "a shared piece of the restore")
                _scatter(message)
            else:
                in_flight.append(message)
        self._shared = in_flight

    def finish(self, deadline_seconds: float) -> None:
        deadline = time.monotonic() + deadline_seconds
        direct, self._direct = self._direct, []
        what = f"{len(self._shared) + len(direct)} shared pieces of the restore"
        while self._shared:
            self._wait_for(self._shared[0].work, what, deadline, deadline_seconds)
            _scatter(self._shared.pop(0))
        if not direct:
            return
        left = max(_PAUSE_SECONDS_MAX, deadline - time.monotonic())

        def wait() -> None:
            for message in direct:
                # On this timeout gloo itself cuts all connections.
                message.work.wait(timedelta(seconds=max(_PAUSE_SECONDS_MAX, deadline - time.monotonic())))

        try:
            within(wait, left + _SLACK_SECONDS, name="holdfast-exchange")
        except TimeoutError:
            raise self._timeout_error(what, deadline_seconds) from None
        except RuntimeError as error:
            if time.monotonic() >= deadline:
                raise self._timeout_error(what, deadline_seconds) from error
            raise self._lost_error(what, error) from error
        for message in direct:
            _scatter(message)

    def _wait_for(
        self, work: Work, what: str, deadline: float | None = None, seconds_max: float = _SECONDS_MAX
    ) -> None:
        deadline = time.monotonic() + seconds_max if deadline is None else deadline
        if not poll_until(work.is_completed, deadline):
            raise self._timeout_error(what, seconds_max)
        self._raise_if_lost(work, what)

    def _raise_if_lost(self, completed: Work, what: str) -> None:
        try:
            completed.wait()
        except RuntimeError as error:
            raise self._lost_error(what, error) from error

    def _lost_error(self, what: str, error: RuntimeError) -> PeerLost:
        self._close_connections()
        return PeerLost(f"a rank was lost while waiting for {what} (gloo: {_first_line(error)})")

    def _timeout_error(self, what: str, seconds_max: float) -> PeerLost:
        self._close_connections()
        return PeerLost(
            f"waited {seconds_max:g} s for {what}; a rank of the job is stopped, slow, or does not take part"
        )

    def _close_connections(self) -> None:
        """Close all connections of the group, and wait until its calls have failed.

        gloo's `abort` ends no call, but the timeout of a receive closes all connections.
        """
        neighbour = (self.rank + 1) % self.ranks
        with contextlib.suppress(RuntimeError):
            never = self._group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], neighbour, _CLOSE_TAG)
            never.wait(timedelta(milliseconds=1))
        deadline = time.monotonic() + _CLOSE_SECONDS_MAX
        while (
            not all(message.work.is_completed() for message in self._shared) and time.monotonic() < deadline
        ):
            time.sleep(_PAUSE_SECONDS_MAX)


def _messages(pieces: Pieces, *, is_sender: bool) -> list[tuple[torch.Tensor, Pieces]]:
    """Divide pieces into messages: the memory of each, and the pieces to copy it to when it has arrived."""
    messages: list[tuple[torch.Tensor, Pieces]] = []
    for group in divide(pieces, _PIECE_BYTES_MAX):
        if len(group) == 1:
            ((address, nbytes),) = group
            memory = torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
            messages.append((memory, ()))
            continue
        packed = torch.empty(sum(nbytes for _, nbytes in group), dtype=torch.uint8, device="cpu")
        messages.append((packed, () if is_sender else group))
        place = packed.data_ptr()
        for address, nbytes in group if is_sender else ():
            ctypes.memmove(place, address, nbytes)
            place += nbytes
    return messages


def _scatter(message: _InFlight) -> None:
    place = message.memory.data_ptr()
    for address, nbytes in message.scattered:
        ctypes.memmove(address, place, nbytes)
        place += nbytes


def _first_line(error: object) -> str:
    return str(error).partition("\n")[0]
