"""Sends chunks from two ranks into the slots of a ring: by holdfast over TCP, TLS and MPI, and by bare sockets.

    python -m benchmarks.raw_tcp tcp stager PLACE …      ◄─ tcp rank PLACE N …     the product's two ports
    python -m benchmarks.raw_tcp tls stager PLACE …      ◄─ tls rank PLACE N …     the same with TLS; PLACE has stager.*
    mpirun … raw_tcp mpi rank … : -n 1 … mpi stager …                              the same over MPI
    python -m benchmarks.raw_tcp bare stager PLACE …     ◄─ bare rank PLACE N …    as many connections, nothing else

All of them share the folder PLACE. The stager's end waits for both ranks, receives all chunks, and prints one line of
JSON: seconds from its first poll until all bytes are there, and its own CPU seconds meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import selectors
import socket
import threading
import time
from pathlib import Path

import numpy as np

from holdfast.config import TrainerConfig
from holdfast.image.entries import Extent
from holdfast.net.address import Address
from holdfast.net.handshake import JobStart
from holdfast.process import wait_readable
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind
from stager.trainers_port import TrainersPort
from trainer_side.ranks.ports import StagerPort

RANKS = 2
CONNECTIONS = 2  # per rank
CERT, CERT_KEY = "stager.pem", "stager.key"
_SLOTS = 16
_IN_FLIGHT = 4
_SECONDS_MAX = 300.0
_PAUSE_SECONDS = 50e-6
_KEY = b"k" * 32


def _slots(chunk_bytes: int) -> list[memoryview]:
    memory = np.ones(_SLOTS * chunk_bytes, dtype=np.uint8).data
    return [memory[slot * chunk_bytes : (slot + 1) * chunk_bytes] for slot in range(_SLOTS)]


def _print(seconds: float, cpu_seconds: float, nbytes: int) -> None:
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "nbytes": nbytes}), flush=True)


# -- the product's ports ---------------------------------------------------------------------------------------------


def _serve(port: TrainersPort, chunks: int, chunk_bytes: int) -> None:
    """Grant each rank credits, receive the chunks, grant more."""
    slots = _slots(chunk_bytes)
    heard: set[int] = set()
    wakes = port.fileno()
    while len(heard) < RANKS:
        heard |= {rank for rank, _ in port.poll().messages}
        time.sleep(0.001)
    begun, cpu = time.monotonic(), time.process_time()
    free = list(range(_SLOTS))
    left = [chunks] * RANKS
    under_way: set[tuple[int, int]] = set()
    arrived = 0
    while arrived < chunks * RANKS:
        for rank in sorted(range(RANKS), key=lambda rank: -left[rank]):
            while free and left[rank] and sum(one == rank for one, _ in under_way) < _SLOTS // RANKS:
                slot = free.pop()
                port.post(rank, slot, slots[slot], (Extent(0, chunk_bytes),))
                port.send(rank, wire.encode(Kind.CREDIT, arg=slot))
                under_way.add((rank, slot))
                left[rank] -= 1
        port.poll()
        came = [place for place in under_way if port.pop_received(*place) is not None]
        for rank, slot in came:
            under_way.discard((rank, slot))
            free.append(slot)
        arrived += len(came)
        if not came:
            if wakes is None:
                time.sleep(_PAUSE_SECONDS)
            else:
                wait_readable([wakes], 0.25)
    _print(time.monotonic() - begun, time.process_time() - cpu, chunks * RANKS * chunk_bytes)
    for rank in range(RANKS):
        port.send(rank, wire.encode(Kind.STAGED))
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        port.poll()
        time.sleep(0.01)


def _send(port: StagerPort, chunk_bytes: int) -> None:
    """Send a chunk for each credit, as the link does: a few at a time."""
    chunk = np.ones(chunk_bytes, dtype=np.uint8).data
    port.send(wire.encode(Kind.HELLO))
    credited: list[int] = []
    sending: list[int] = []
    deadline = time.monotonic() + _SECONDS_MAX
    while time.monotonic() < deadline:
        for message in port.poll():
            frame = wire.decode(message)
            if frame.kind is Kind.STAGED:
                return
            credited.append(frame.arg)
        sending = [handle for handle in sending if not port.is_sent(handle)]
        while credited and len(sending) < _IN_FLIGHT:
            sending.append(port.send_payload(chunk, credited.pop(0), [chunk_bytes]))
        time.sleep(_PAUSE_SECONDS)


def _tcp_stager(place: Path, host: str, chunks: int, chunk_bytes: int, *, with_tls: bool = False) -> None:
    from holdfast.net.tls import StagerTls
    from stager.job_listener import JobListener, listen
    from stager.reactor import Reactor
    from stager.tcp import TcpTrainersPort

    sock, reactor = listen(Address(host, 0)), Reactor()
    tls = StagerTls(place / CERT, place / CERT_KEY) if with_tls else None
    listener = JobListener(sock, reactor, _KEY, ranks=RANKS, tls=tls)
    _tell(place, sock)
    while (hello := listener.next_job()) is None:
        reactor.run_once()
        time.sleep(0.001)
    port = TcpTrainersPort(reactor, hello, reconnect_seconds_max=30.0, start_seconds_max=_SECONDS_MAX)
    listener.open_job(port)
    _serve(port, chunks, chunk_bytes)


def _tcp_rank(place: Path, rank: int, chunk_bytes: int, *, with_tls: bool = False) -> None:
    from trainer_side.ranks.tcp_stager_port import StagerTarget, connect_to_stager

    tls_ca = place / CERT if with_tls else None
    port = connect_to_stager(
        TrainerConfig(connections=CONNECTIONS, reconnect_seconds_max=30.0, tls_ca=tls_ca),
        StagerTarget(_told(place), _KEY),
        rank=rank,
        ranks=RANKS,
        start=JobStart("benchmark", b"1" * 16),
        seconds_max=_SECONDS_MAX,
    )
    _send(port, chunk_bytes)


def _tell(place: Path, sock: socket.socket) -> None:
    host, port = sock.getsockname()[:2]
    (place / "new").write_text(f"{host}:{port}")
    (place / "new").replace(place / "address")


def _told(place: Path) -> str:
    deadline = time.monotonic() + _SECONDS_MAX
    while not (place / "address").exists():
        if time.monotonic() > deadline:
            raise TimeoutError("the stager's end does not listen")
        time.sleep(0.01)
    return (place / "address").read_text()


# -- bare sockets ----------------------------------------------------------------------------------------------------


def _bare_stager(place: Path, host: str, chunks: int, chunk_bytes: int) -> None:
    """Receive each connection's bytes into one slot after the other."""
    slots = _slots(chunk_bytes)
    server = socket.create_server((host, 0))
    _tell(place, server)
    socks = [server.accept()[0] for _ in range(RANKS * CONNECTIONS)]
    with selectors.DefaultSelector() as selector:
        for number, sock in enumerate(socks):
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_READ, _Targets(sock, slots[number :: len(socks)]))
        for sock in socks:
            sock.sendall(b"!")
        begun, cpu = time.monotonic(), time.process_time()
        left = chunks * RANKS * chunk_bytes
        while left:
            for key, _ in selector.select():
                targets = key.data
                nbytes = targets.sock.recv_into(targets.present)
                targets.present = targets.present[nbytes:]
                if not len(targets.present):
                    targets.present = next(targets.following)
                left -= nbytes
    _print(time.monotonic() - begun, time.process_time() - cpu, chunks * RANKS * chunk_bytes)


class _Targets:
    """A connection and the place of its next bytes, cycling through its own slots."""

    def __init__(self, sock: socket.socket, slots: list[memoryview]) -> None:
        self.sock, self.following = sock, itertools.cycle(slots)
        self.present = next(self.following)


def _bare_rank(place: Path, chunks: int, chunk_bytes: int) -> None:
    host, _, port = _told(place).rpartition(":")
    chunk = np.ones(chunk_bytes, dtype=np.uint8).data

    def send(count: int) -> None:
        with socket.create_connection((host, int(port))) as sock:
            sock.recv(1)
            for _ in range(count):
                sock.sendall(chunk)

    counts = [chunks // CONNECTIONS + (number < chunks % CONNECTIONS) for number in range(CONNECTIONS)]
    threads = [threading.Thread(target=send, args=(count,)) for count in counts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    """Run one process of one way."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["tcp", "tls", "mpi", "bare"])
    parser.add_argument("role", choices=["stager", "rank"])
    parser.add_argument("--place", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--chunks", type=int, required=True, help="of each rank")
    parser.add_argument("--chunk-bytes", type=int, required=True)
    a = parser.parse_args()
    if a.way == "mpi":
        if a.role == "stager":
            from stager.mpi import MpiTrainersPort

            _serve(MpiTrainersPort.join(_SECONDS_MAX), a.chunks, a.chunk_bytes)
        else:
            from trainer_side.ranks.joined import join_world

            _send(join_world(TrainerConfig(start_seconds_max=_SECONDS_MAX)).port(), a.chunk_bytes)
    elif a.way == "bare":
        if a.role == "stager":
            _bare_stager(a.place, a.host, a.chunks, a.chunk_bytes)
        else:
            _bare_rank(a.place, a.chunks, a.chunk_bytes)
    elif a.role == "stager":
        _tcp_stager(a.place, a.host, a.chunks, a.chunk_bytes, with_tls=a.way == "tls")
    else:
        _tcp_rank(a.place, a.rank, a.chunk_bytes, with_tls=a.way == "tls")


if __name__ == "__main__":
    main()
