"""The two ends of a transport between ranks and stager, in separate processes, with the same scenes for each transport.

    mpirun -n 2 python -m tests.conformance.jobs.transport mpi rank : -n 1 python -m … mpi stager
    python -m … tcp stager PORT-FILE          python -m … tcp rank PORT-FILE RANK
    python -m … tls stager PORT-FILE          python -m … tls rank PORT-FILE RANK      certificates beside PORT-FILE

The stager's end checks and prints `held SCENE` for each scene; a rank does what its scene says.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.config import TrainerConfig
from holdfast.image.entries import Extent
from holdfast.net.address import Address
from holdfast.net.handshake import Hello, JobStart
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind
from stager.trainers_port import TrainersPort
from trainer_side.ranks.ports import StagerPort

RANKS = 2
SLOT_BYTES = 4 << 20
_SECONDS_MAX = 60.0
_STAYS_SECONDS = 3.0
_MANY = 2000
_SIZES = (0, 1, 100, 65_535, 65_536, 1_000_000, 9_000_000)


def pattern(rank: int, seed: int, nbytes: int) -> bytes:
    """Return bytes that depend on rank, seed and position."""
    return bytes((rank * 101 + seed * 31 + place * 7) % 251 for place in range(min(nbytes, 2510))) * (
        nbytes // 2510 + 1
    )


def _frame(kind: Kind, step: int, body: bytes = b"", arg: int = 0) -> bytes:
    return wire.encode(kind, step=step, body=body, arg=arg)


# -- the stager's end ------------------------------------------------------------------------------------------------


class StagerEnd:
    """Polls the port, and queues messages and losses until a scene takes them."""

    def __init__(self, port: TrainersPort) -> None:
        self.port = port
        self.messages: list[list[wire.Frame]] = [[] for _ in range(port.ranks)]
        self.lost: list[tuple[int, str]] = []

    def turn(self) -> None:
        """Poll the port once, and queue all events."""
        seen = self.port.poll()
        for rank, message in seen.messages:
            self.messages[rank].append(wire.decode(message))
        self.lost += seen.lost

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Poll until the condition holds."""
        deadline = time.monotonic() + _SECONDS_MAX
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {_SECONDS_MAX:g} s: {what}")
            self.turn()
            time.sleep(0.0005)

    def take(self, rank: int, kind: Kind) -> wire.Frame:
        """Return the rank's next message, which must be of this kind."""
        self.until(lambda: bool(self.messages[rank]), f"{kind.name} of rank {rank}")
        frame = self.messages[rank].pop(0)
        assert frame.kind is kind, f"rank {rank} sent {frame.kind.name}, expected {kind.name}"
        return frame

    def receive(self, rank: int, slot: int) -> int:
        """Wait for a payload; return the number of bytes received."""
        found: list[int] = []

        def look() -> bool:
            nbytes = self.port.pop_received(rank, slot)
            if nbytes is not None:
                found.append(nbytes)
            return bool(found)

        self.until(look, f"the payload of rank {rank} into slot {slot}")
        return found[0]


def _messages_stager(end: StagerEnd) -> None:
    """Messages of all sizes arrive both ways, in order and exactly once, thousands at a time."""
    for rank in range(RANKS):
        for step, nbytes in enumerate(_SIZES):
            frame = end.take(rank, Kind.DONE)
            assert (frame.step, frame.body) == (step, pattern(rank, step, nbytes)[:nbytes])
            end.port.send(rank, _frame(Kind.FETCHED, step, frame.body))
    for rank in range(RANKS):
        for step in range(_MANY):
            end.port.send(rank, _frame(Kind.DURABLE, step))
    for rank in range(RANKS):
        assert [end.take(rank, Kind.OFFER).step for _ in range(_MANY)] == list(range(_MANY))
    end.until(
        lambda: not any(end.port.unsent_to(rank) for rank in range(RANKS)), "all messages to be received"
    )


def _messages_rank(port: RankEnd) -> None:
    for step, nbytes in enumerate(_SIZES):
        port.port.send(_frame(Kind.DONE, step, pattern(port.rank, step, nbytes)[:nbytes]))
    for step, nbytes in enumerate(_SIZES):
        frame = port.take(Kind.FETCHED)
        assert (frame.step, frame.body) == (step, pattern(port.rank, step, nbytes)[:nbytes])
    for step in range(_MANY):
        port.port.send(_frame(Kind.OFFER, step))
    assert [port.take(Kind.DURABLE).step for _ in range(_MANY)] == list(range(_MANY))


_PIECES: tuple[tuple[Extent, ...], ...] = (
    (Extent(0, SLOT_BYTES),),
    (Extent(4096, 1),),
    (Extent(0, 100_000), Extent(200_000, 64), Extent(3_000_000, 900_000)),
    tuple(Extent(place * 8192, 1 + place % 4096) for place in range(300)),
)


def _payloads_stager(end: StagerEnd) -> None:
    """Concurrent payloads of both ranks, contiguous and scattered, put each byte in its place and touch no other."""
    slots = [bytearray(b"\xff" * SLOT_BYTES) for _ in range(RANKS * len(_PIECES))]
    for number, pieces in enumerate(_PIECES):
        for rank in range(RANKS):
            slot = number * RANKS + rank
            end.port.post(rank, slot, memoryview(slots[slot]), pieces)
            end.port.send(rank, _frame(Kind.CREDIT, number, arg=slot))
    for number, pieces in enumerate(_PIECES):
        nbytes = sum(piece.nbytes for piece in pieces)
        for rank in range(RANKS):
            slot = number * RANKS + rank
            assert end.receive(rank, slot) == nbytes
            expected = bytearray(b"\xff" * SLOT_BYTES)
            place, data = 0, pattern(rank, number, nbytes)
            for piece in pieces:
                expected[piece.offset : piece.end] = data[place : place + piece.nbytes]
                place += piece.nbytes
            assert slots[slot] == expected, f"rank {rank}, payload {number}"
    for rank in range(RANKS):
        assert [end.take(rank, Kind.SENT).step for _ in _PIECES] == list(range(len(_PIECES)))


def _payloads_rank(port: RankEnd) -> None:
    for number, pieces in enumerate(_PIECES):
        credit = port.take(Kind.CREDIT)
        assert credit.step == number
        sizes = [piece.nbytes for piece in pieces]
        port.send_payload(pattern(port.rank, number, sum(sizes))[: sum(sizes)], credit.arg, sizes)
        port.port.send(_frame(Kind.SENT, number))


def _withdrawn_stager(end: StagerEnd) -> None:
    """A cancelled receive takes no bytes, and its slot takes the rank's next payload."""
    memory = bytearray(SLOT_BYTES)
    end.port.post(0, 3, memoryview(memory), (Extent(0, 1000),))
    end.port.cancel(0, 3)
    assert end.port.pop_received(0, 3) is None
    end.port.post(0, 3, memoryview(memory), (Extent(5000, 1000),))
    end.port.send(0, _frame(Kind.CREDIT, 1, arg=3))
    assert end.receive(0, 3) == 1000
    assert memory == bytes(5000) + pattern(0, 1, 1000)[:1000] + bytes(SLOT_BYTES - 6000)


def _withdrawn_rank(port: RankEnd) -> None:
    if port.rank == 0:
        port.send_payload(pattern(0, 1, 1000)[:1000], port.take(Kind.CREDIT).arg, [1000])


def _short_stager(end: StagerEnd) -> None:
    """A payload that is too short is reported with the received size."""
    end.port.post(1, 2, memoryview(bytearray(SLOT_BYTES)), (Extent(0, 5000),))
    end.port.send(1, _frame(Kind.CREDIT, 2, arg=2))
    assert end.receive(1, 2) == 4000


def _short_rank(port: RankEnd) -> None:
    if port.rank == 1:
        port.send_payload(pattern(1, 2, 4000)[:4000], port.take(Kind.CREDIT).arg, [4000])


def _death_stager(end: StagerEnd) -> None:
    """A rank that leaves is not lost; one that dies is lost once, after its earlier messages are delivered."""
    end.port.send(1, _frame(Kind.FAILED, 9))
    assert end.take(1, Kind.DECLINE).step == 9
    end.until(lambda: bool(end.lost), "rank 1 to be lost")
    assert [rank for rank, _ in end.lost] == [1], end.lost
    end.port.send(1, _frame(Kind.FAILED, 10))  # to a lost rank: must do nothing
    end.port.send(0, _frame(Kind.FAILED, 10))
    end.take(0, Kind.BYE)
    end.port.mark_left(0)
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        end.turn()
        time.sleep(0.01)
    assert [rank for rank, _ in end.lost] == [1], end.lost


def _death_rank(port: RankEnd) -> None:
    if port.rank == 1:
        port.take(Kind.FAILED)
        port.port.send(_frame(Kind.DECLINE, 9))
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:  # until the message has left this process
            port.port.poll()
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    port.take(Kind.FAILED)
    port.port.disconnect(10.0)


# -- a rank's end ----------------------------------------------------------------------------------------------------


class RankEnd:
    """Polls the port, and queues messages until a scene takes them."""

    def __init__(self, port: StagerPort, rank: int) -> None:
        self.port, self.rank = port, rank
        self._messages: list[wire.Frame] = []

    def take(self, kind: Kind) -> wire.Frame:
        """Return the stager's next message, which must be of this kind."""
        deadline = time.monotonic() + _SECONDS_MAX
        while not self._messages:
            assert time.monotonic() < deadline, f"rank {self.rank} waits for {kind.name}"
            self._messages += [wire.decode(message) for message in self.port.poll()]
            time.sleep(0.0005)
        frame = self._messages.pop(0)
        assert frame.kind is kind, f"the stager sent {frame.kind.name}, expected {kind.name}"
        return frame

    def send_payload(self, payload: bytes, slot: int, sizes: Sequence[int]) -> None:
        """Send a payload, and wait until its memory may change."""
        handle = self.port.send_payload(memoryview(payload), slot, sizes)
        deadline = time.monotonic() + _SECONDS_MAX
        while not self.port.is_sent(handle):
            assert time.monotonic() < deadline, f"the payload into slot {slot} does not leave"
            self._messages += [wire.decode(message) for message in self.port.poll()]
            time.sleep(0.0005)


SCENES: dict[str, tuple[Callable[[StagerEnd], None], Callable[[RankEnd], None]]] = {
    "messages": (_messages_stager, _messages_rank),
    "payloads": (_payloads_stager, _payloads_rank),
    "withdrawn": (_withdrawn_stager, _withdrawn_rank),
    "short": (_short_stager, _short_rank),
    "death": (_death_stager, _death_rank),  # must come last: a rank dies
}


# -- setup of each transport ---------------------------------------------------------------------------------------

_KEY = b"k" * 32
_INCARNATION = b"i" * 16


def _stager_over_mpi() -> TrainersPort:
    from stager.mpi import MpiTrainersPort

    return MpiTrainersPort.join(_SECONDS_MAX)


def _rank_over_mpi() -> RankEnd:
    from trainer_side.ranks.joined import join_world

    world = join_world(TrainerConfig(start_seconds_max=_SECONDS_MAX))
    return RankEnd(world.port(), world.rank)


def _stager_over_tcp(port_file: Path, *, with_tls: bool) -> TrainersPort:
    from holdfast.net.tls import StagerTls
    from stager.job_listener import JobListener, listen
    from stager.reactor import Reactor
    from stager.tcp import TcpTrainersPort

    sock = listen(Address("127.0.0.1", 0))
    reactor = Reactor()
    tls = (
        StagerTls(port_file.with_name("stager.pem"), port_file.with_name("stager.key")) if with_tls else None
    )
    listener = JobListener(sock, reactor, _KEY, ranks=RANKS, tls=tls)
    port_file.with_suffix(".new").write_text(str(sock.getsockname()[1]))
    port_file.with_suffix(".new").replace(port_file)
    deadline = time.monotonic() + _SECONDS_MAX
    hello: Hello | None = None
    while hello is None:
        assert time.monotonic() < deadline, "no rank has come"
        reactor.run_once()
        hello = listener.next_job()
        time.sleep(0.001)
    port = TcpTrainersPort(reactor, hello, reconnect_seconds_max=1.0, start_seconds_max=_SECONDS_MAX)
    listener.open_job(port)
    return port


def _rank_over_tcp(port_file: Path, rank: int, *, with_tls: bool) -> RankEnd:
    from trainer_side.ranks.tcp_stager_port import StagerTarget, connect_to_stager

    deadline = time.monotonic() + _SECONDS_MAX
    while not port_file.exists():
        assert time.monotonic() < deadline, "the stager does not listen"
        time.sleep(0.01)
    tls_ca = port_file.with_name("authority.pem") if with_tls else None
    port = connect_to_stager(
        TrainerConfig(connections=2, reconnect_seconds_max=1.0, tls_ca=tls_ca),
        StagerTarget(f"127.0.0.1:{port_file.read_text()}", _KEY),
        rank=rank,
        ranks=RANKS,
        start=JobStart("test", _INCARNATION),
        seconds_max=_SECONDS_MAX,
    )
    return RankEnd(port, rank)


def main() -> None:
    """Run one end of one transport."""
    transport, role, *rest = sys.argv[1:]
    if role == "stager":
        end = StagerEnd(
            _stager_over_mpi()
            if transport == "mpi"
            else _stager_over_tcp(Path(rest[0]), with_tls=transport == "tls")
        )
        for name, (stager, _) in SCENES.items():
            stager(end)
            print(f"held {name}", flush=True)
        os._exit(0)  # MPI_Finalize would wait for the dead rank
    rank = (
        _rank_over_mpi()
        if transport == "mpi"
        else _rank_over_tcp(Path(rest[0]), int(rest[1]), with_tls=transport == "tls")
    )
    for _, of_rank in SCENES.values():
        of_rank(rank)
    if transport == "mpi":  # in an MPI job, a process that ends before the others counts as dead
        time.sleep(_STAYS_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    main()
