"""TCP between the machines of a world, as far as a program may rely on it: sockets, epoll and eventfd without a kernel.

    send ─► buffer and wire, in order, any delay ─► inbox ─► recv, in parts of any size
              ! cut: both ends notice, bytes under way are lost            ! half open: one end does not notice
              ! stall: nothing moves for a while; ends may time out        ! slow      ! connections refused

When a connection is cut, bytes that were sent and not yet read may be lost from any byte on. The kernel of a process
that dies closes its sockets. If the machine vanishes, the other end notices only by keepalive. The kernel of a frozen
process still accepts bytes, as far as there is room.
"""

from __future__ import annotations

import errno
import os as real_os
import select as real_select
import socket as real_socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tests.simulation.runtime import PLAYED_MIN, SIM, PlayedModule, SimPoll, played_events
from tests.simulation.scheduler import Process

if TYPE_CHECKING:
    from tests.simulation.tcp_world import TcpWorld

__all__ = ["Network", "SimSocket", "install_network"]

_FITS_BYTES = 4096  # at the beginning of a connection: the buffers are empty
_UNHEARD_SECONDS = (9.0, 12.0)  # until keepalive, or TCP_USER_TIMEOUT, ends a connection
_CONNECT_AGAIN_SECONDS = 0.5
_YIELD_SHARE = 0.05  # of the system calls; after these another process runs
_PARTIAL_SHARE = 0.3
_ACCEPT_QUEUE_MAX = 64
_IDLE_TURNS_MAX = 200  # of a loop that is woken and does nothing


class Path:
    """The path between one process and the stager's machine.

    Attributes:
        hole_until: Nothing moves before. `slow_until`: bytes move slowly. `refusing_until`: no new connections.
    """

    def __init__(self) -> None:
        self.hole_until = self.slow_until = self.refusing_until = -1.0


class Network:
    """All connections of one world.

    Args:
        world: Has the scheduler, and the plan with `window_bytes` and `cut_share`.

    Attributes:
        cuts: Number of connections that were cut.
        calls: Number of calls that have moved bytes, or made or ended a connection.
    """

    def __init__(self, world: TcpWorld) -> None:
        self.world, self.sim = world, world.scheduler
        self.listeners: dict[int, SimSocket] = {}
        self.paths: dict[int, Path] = {}
        self.open: list[SimSocket] = []  # the ranks' ends
        self.cuts = self.calls = 0
        self._numbers = PLAYED_MIN
        self._ports = 40_000

    def add(self, played: Any) -> int:
        """Register a simulated file; return its descriptor."""
        self._numbers += 1
        SIM.descriptors[self._numbers] = played
        return self._numbers

    def port(self) -> int:
        self._ports += 1
        return self._ports

    def path(self, process: Process) -> Path:
        """The path of a rank's process."""
        return self.paths.setdefault(process.number, Path())

    def delay_seconds(self, path: Path) -> float:
        chance = self.sim.chance
        if path.slow_until > self.sim.now:
            return 0.05 + chance.random()
        return 0.0 if chance.random() < 0.6 else chance.random() * 0.02

    def living(self) -> list[SimSocket]:
        """The ranks' ends of all connections that are intact."""
        self.open = [sock for sock in self.open if not sock.closed and not sock.severed]
        return self.open

    def cut(self, end: SimSocket) -> None:
        """Reset a connection: both ends notice."""
        self.cuts += 1
        peer = end.peer
        assert peer is not None
        for sock in (end, peer):
            sock.lose(arrives=self.sim.chance.random() < 0.5)
        for sock in (end, peer):
            self.sim.later(self.sim.chance.random() * 0.05, sock.hear_reset)

    def half_open(self, end: SimSocket, seconds: float) -> None:
        """Break a connection: this end notices at once, the other one only after a while."""
        self.cuts += 1
        peer = end.peer
        assert peer is not None
        for sock in (end, peer):
            sock.lose(arrives=False)
        end.hear_reset()
        self.sim.later(seconds, peer.hear_timeout)

    def hole(self, path: Path, seconds: float) -> None:
        """Stall this path for a while. Ends that wait too long then close their connections."""
        path.hole_until = self.sim.now + seconds
        for end in self.living():
            if end.path is path:
                for sock in (end, end.peer):
                    assert sock is not None
                    after = self.sim.chance.uniform(*_UNHEARD_SECONDS)
                    self.sim.later(after, sock.hear_silence)


class SimSocket:
    """As `socket.socket`, of one simulated process: it listens, or is one end of a connection."""

    def __init__(self, network: Network, owner: Process, path: Path) -> None:
        self.network, self.owner, self.path = network, owner, path
        self.number = network.add(self)
        self.peer: SimSocket | None = None
        self.inbox = bytearray()
        self.under_way = 0  # bytes that have left here, and have not arrived
        self.sent_bytes = 0
        self.ended = False  # the other end has closed, and all its bytes were read
        self.error = 0
        self.closed = self.severed = False
        self.keepalive = self.impatient = False
        self._wire: deque[tuple[float, bytes]] = deque()  # when it arrives; no bytes: the end
        self._clear_at = 0.0
        self._timeout: float | None = None
        self._place = ("", 0)
        self._accepted: deque[SimSocket] | None = None
        owner.held.append(self._die)

    # -- as a program sees it ------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return -1 if self.closed else self.number

    def setblocking(self, blocking: bool) -> None:
        self._timeout = None if blocking else 0.0

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def setsockopt(self, level: int, option: int, value: int) -> None:
        if (level, option) == (real_socket.SOL_SOCKET, real_socket.SO_KEEPALIVE):
            self.keepalive = bool(value)
        if (level, option) == (real_socket.IPPROTO_TCP, real_socket.TCP_USER_TIMEOUT):
            self.impatient = bool(value)

    def getsockname(self) -> tuple[str, int]:
        return self._place

    def bind(self, place: tuple[str, int]) -> None:
        self._place = place

    def listen(self, _backlog: int) -> None:
        if self._place[1] in self.network.listeners:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        self._accepted = deque()
        self.network.listeners[self._place[1]] = self

    def accept(self) -> tuple[SimSocket, tuple[str, int]]:
        SIM.now.check_alive()
        assert self._accepted is not None
        if not self._accepted:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        sock = self._accepted.popleft()
        self.network.calls += 1
        return sock, ("10.0.0.1", self.network.port())

    def send(self, data: Any) -> int:
        self._call("send")
        view = memoryview(data).cast("B")
        if self._timeout != 0.0:
            self._wait(self._has_room)
        if self.error:
            raise OSError(self.error, real_os.strerror(self.error))
        room = self._room()
        if room <= 0:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        nbytes = self._some(min(room, len(view))) if self.sent_bytes >= _FITS_BYTES else min(room, len(view))
        self._put(bytes(view[:nbytes]))
        chance, plan = self.network.sim.chance, self.network.world.plan
        if plan.cut_share and not self.severed and chance.random() < plan.cut_share and not self._is_calm():
            SIM.now.note(f"! a connection of {self._whose()} is cut")
            self.network.cut(self)
        return nbytes

    def sendmsg(self, parts: Sequence[Any]) -> int:
        return self.send(b"".join(bytes(part) for part in parts))

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self.send(view) :]

    def recv_into(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.recv(len(view))
        view[: len(data)] = data
        return len(data)

    def recvmsg_into(self, buffers: Sequence[memoryview]) -> tuple[int, list[Any], int, None]:
        data = self.recv(sum(len(buffer) for buffer in buffers))
        at = 0
        for buffer in buffers:
            part = data[at : at + len(buffer)]
            buffer[: len(part)] = part
            at += len(part)
        return len(data), [], 0, None

    def recv(self, nbytes: int) -> bytes:
        self._call("recv")
        if self._timeout != 0.0:
            self._wait(self._is_readable)
        if self.inbox:
            taken = self._some(min(nbytes, len(self.inbox)))
            data = bytes(self.inbox[:taken])
            del self.inbox[:taken]
            self.network.calls += 1
            return data
        if self.error:
            raise OSError(self.error, real_os.strerror(self.error))
        if self.ended:
            return b""
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    def close(self) -> None:
        if SIM.now.unwinding is None:
            self._die()

    def __enter__(self) -> SimSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, name: str) -> None:
        sim = SIM.now
        sim.check_alive()
        if sim.chance.random() < _YIELD_SHARE:
            sim.step(name)
        if self.closed:
            raise OSError(errno.EBADF, "Bad file descriptor")

    def _wait(self, condition: Callable[[], bool]) -> None:
        if not SIM.now.wait(lambda: condition() or self.error or self.closed, self._timeout, "socket"):
            raise TimeoutError(errno.ETIMEDOUT, "timed out")

    def _some(self, nbytes: int) -> int:
        chance = self.network.sim.chance
        return chance.randint(1, nbytes) if nbytes > 1 and chance.random() < _PARTIAL_SHARE else nbytes

    # -- as the kernel does it -----------------------------------------------------------------------------------

    def mask(self) -> int:
        """Ready events, as poll reports them."""
        if self._accepted is not None:
            return real_select.POLLIN if self._accepted else 0
        mask = real_select.POLLERR if self.error else 0
        if self._is_readable():
            mask |= real_select.POLLIN
        if self._has_room():
            mask |= real_select.POLLOUT
        return mask

    def _is_readable(self) -> bool:
        return bool(self.inbox or self.error or self.ended)

    def _has_room(self) -> bool:
        return bool(self.error) or self._room() > 0

    def _room(self) -> int:
        peer = self.peer
        unread = len(peer.inbox) if peer is not None else 0
        room: int = self.network.world.plan.window_bytes - self.under_way - unread
        return max(room, _FITS_BYTES - self.sent_bytes)

    def _put(self, data: bytes) -> None:
        self.network.calls += 1
        self.under_way += len(data)
        self.sent_bytes += len(data)
        if not self.severed:
            self._queue(data)

    def _queue(self, data: bytes) -> None:
        sim = self.network.sim
        self._clear_at = max(self._clear_at, sim.now + self.network.delay_seconds(self.path))
        self._wire.append((self._clear_at, data))
        sim.call_at(self._clear_at, self._move)

    def _move(self) -> None:
        """Deliver the bytes that are due."""
        sim, peer = self.network.sim, self.peer
        assert peer is not None
        while self._wire and self._wire[0][0] <= sim.now:
            if self.path.hole_until > sim.now:
                sim.call_at(self.path.hole_until, self._move)
                return
            _, data = self._wire.popleft()
            self._arrive(data, peer)

    def _arrive(self, data: bytes, peer: SimSocket) -> None:
        self.under_way -= len(data)
        if not data:
            peer.ended = True
        elif peer.closed:
            self.lose(arrives=False)
            self.network.sim.later(0.0, self.hear_reset)
        else:
            peer.inbox += data

    def lose(self, *, arrives: bool) -> None:
        """Break the connection; a part of the bytes under way from here may arrive, the rest never does."""
        peer = self.peer
        assert peer is not None
        if arrives and not self.severed and not peer.closed:
            data = b"".join(data for _, data in self._wire)
            peer.inbox += data[: self.network.sim.chance.randint(0, len(data))]
        self.severed = True
        self._wire.clear()

    def hear_reset(self) -> None:
        self.error = self.error or errno.ECONNRESET
        if self.network.sim.chance.random() < 0.5:
            self.inbox.clear()

    def hear_timeout(self) -> None:
        self.error = self.error or errno.ETIMEDOUT

    def hear_silence(self) -> None:
        """The other end has not answered for long: an end with timeouts closes the connection."""
        if self.path.hole_until <= self.network.sim.now or self.closed or self.severed:
            return
        if self.impatient or (self.keepalive and not self.under_way):
            self.lose(arrives=False)
            self.hear_timeout()

    def _die(self) -> None:
        """Close the socket, for the program or the kernel."""
        if self.closed:
            return
        self.closed = True
        self.network.calls += 1
        SIM.descriptors.pop(self.number, None)
        if self._accepted is not None:
            self.network.listeners.pop(self._place[1], None)
            return
        peer = self.peer
        assert peer is not None
        if self.severed:
            return
        if self.owner.notes.get("vanished") and not self.owner.alive:
            peer.lose(arrives=False)
            self.lose(arrives=False)
            self.network.sim.later(self.network.sim.chance.uniform(*_UNHEARD_SECONDS), peer.hear_gone)
        elif self.inbox:
            self.lose(arrives=False)
            peer.lose(arrives=False)
            self.network.sim.later(self.network.delay_seconds(self.path), peer.hear_reset)
        else:
            self._queue(b"")

    def hear_gone(self) -> None:
        """The other end's machine has vanished."""
        if self.impatient or (self.keepalive and not self.under_way):
            self.hear_timeout()

    def _whose(self) -> str:
        return self.owner.name if self.owner.kind == "rank" or self.peer is None else self.peer.owner.name

    def _is_calm(self) -> bool:
        return self.network.world.calm


class SimEventFd:
    """A counter that wakes its pollers."""

    def __init__(self) -> None:
        self.count = 0

    def mask(self) -> int:
        return real_select.POLLIN if self.count else 0


class SimEpoll:
    """As `select.epoll`; the product never waits in it, but waits for its descriptor."""

    def __init__(self) -> None:
        self._number = SIM.world.network.add(self)
        self._played: dict[int, int] = {}
        self._kernels = real_select.poll()
        self._calls = self._idle_turns = 0

    def fileno(self) -> int:
        return int(self._number)

    def register(self, fd: int, events: int) -> None:
        if fd >= PLAYED_MIN:
            self._played[fd] = events
        else:
            self._kernels.register(fd, events)

    def modify(self, fd: int, events: int) -> None:
        assert fd in self._played
        self._played[fd] = events

    def unregister(self, fd: int) -> None:
        if fd >= PLAYED_MIN:
            del self._played[fd]
        else:
            self._kernels.unregister(fd)

    def poll(self, timeout: float, maxevents: int) -> list[tuple[int, int]]:
        assert timeout == 0
        found = self._ready()
        SIM.now.chance.shuffle(found)
        network = SIM.world.network
        self._idle_turns = self._idle_turns + 1 if found and network.calls == self._calls else 0
        self._calls = network.calls
        if self._idle_turns > _IDLE_TURNS_MAX:
            SIM.world.checks.broken("the stager spins: it is woken again and again, and does nothing")
        return found[:maxevents]

    def _ready(self) -> list[tuple[int, int]]:
        return self._kernels.poll(0) + played_events(self._played)

    def mask(self) -> int:
        return real_select.POLLIN if self._ready() else 0


# -- in place of the modules -------------------------------------------------------------------------------------------


class _Socket(PlayedModule):
    """`socket`, for the stager's reception and the ranks' connector."""

    def socket(self, *_: Any) -> SimSocket:
        network = SIM.world.network
        return SimSocket(network, SIM.now.here, Path())

    def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        return [(real_socket.AF_INET, real_socket.SOCK_STREAM, 0, "", (host, port))]

    def create_connection(self, address: tuple[str, int], timeout: float) -> SimSocket:
        sim, network = SIM.now, SIM.world.network
        sim.check_alive()
        process, end = sim.here, sim.now + timeout
        path = network.path(process)
        sim.wait(None, network.delay_seconds(path), "connect")
        sim.wait(lambda: path.hole_until <= sim.now, min(timeout, path.hole_until - sim.now), "connect")
        if sim.now < path.hole_until:
            raise TimeoutError(errno.ETIMEDOUT, "timed out")
        listener = network.listeners.get(address[1])
        if listener is None and network.world.stager_vanished:  # no machine is there to refuse it
            sim.wait(lambda: address[1] in network.listeners, end - sim.now, "connect")
            raise TimeoutError(errno.ETIMEDOUT, "timed out")
        if listener is None or path.refusing_until > sim.now or len(listener._accepted) >= _ACCEPT_QUEUE_MAX:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        here, there = SimSocket(network, process, path), SimSocket(network, listener.owner, path)
        here.peer, there.peer = there, here
        here.settimeout(timeout)
        listener._accepted.append(there)
        network.open.append(here)
        return here


class _Pairs(PlayedModule):
    """`socket`, for the stager's main loop: the kernel's own pair, which it closes when the process ends."""

    def socketpair(self) -> tuple[real_socket.socket, real_socket.socket]:
        pair = real_socket.socketpair()
        for sock in pair:
            SIM.now.here.held.append(sock.close)
        return pair


class _Os(PlayedModule):
    """`os`, for the calls that concern connections."""

    def urandom(self, nbytes: int) -> bytes:
        return bytes(SIM.now.chance.randbytes(nbytes))

    def eventfd(self, *_: int) -> int:
        return int(SIM.world.network.add(SimEventFd()))

    def eventfd_write(self, fd: int, count: int) -> None:
        SIM.descriptors[fd].count += count

    def eventfd_read(self, fd: int) -> int:
        made: SimEventFd = SIM.descriptors[fd]
        count, made.count = made.count, 0
        return count


class _Epoll(PlayedModule):
    """`select` with simulated epoll and poll."""

    epoll, poll = SimEpoll, SimPoll


def install_network() -> None:
    """Replace the modules wherever the product reaches its stager or its ranks over TCP."""
    import stager.job_listener
    import stager.reactor
    import stager.standing
    from trainer_side.ranks import connecting, payload_sender

    sockets, system = _Socket(real_socket), _Os(real_os)
    for module, name, played in (
        (stager.standing, "socket", _Pairs(real_socket)),
        (stager.reactor, "select", _Epoll(real_select)),
        (stager.job_listener, "socket", sockets),
        (stager.job_listener, "os", system),
        (connecting, "socket", sockets),
        (connecting, "os", system),
        (payload_sender, "os", system),
    ):
        setattr(module, name, played)
