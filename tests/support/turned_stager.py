"""A stager's ports over TCP whose loop a test runs by hand, with the listener that admits jobs."""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.net.address import Address
from holdfast.net.tls import StagerTls
from stager.job_listener import JobListener, listen
from stager.reactor import Reactor
from stager.tcp import TcpTrainersPort

__all__ = ["KEY", "SECONDS_MAX", "TurnedStager"]

KEY = b"k" * 32
SECONDS_MAX = 60.0
_RECONNECT_SECONDS = 1.0


class TurnedStager:
    """A listening stager's ports; the test runs the loop.

    Attributes:
        messages: Messages received, each with its rank. `lost`: ranks lost, each with the reason.
    """

    def __init__(self, *, key: bytes = KEY, ranks: int | None = None, tls: StagerTls | None = None) -> None:
        self.sock = listen(Address("127.0.0.1", 0))
        self.port_number = int(self.sock.getsockname()[1])
        self.reactor = Reactor()
        self.listener = JobListener(self.sock, self.reactor, key, ranks=ranks, tls=tls)
        self.port: TcpTrainersPort | None = None
        self.messages: list[tuple[int, bytes]] = []
        self.lost: list[tuple[int, str]] = []

    def until(self, condition: Callable[[], bool], what: str = "it") -> None:
        """Run the loop until the condition holds."""
        deadline = time.monotonic() + SECONDS_MAX
        while not condition():
            assert time.monotonic() < deadline, f"not within {SECONDS_MAX:g} s: {what}"
            self.turn()
            time.sleep(0.0005)

    def turn(self) -> None:
        """Run the loop once."""
        if self.port is None:
            self.reactor.run_once()
            return
        seen = self.port.poll()
        self.messages += seen.messages
        self.lost += seen.lost

    def open_next(self, reconnect_seconds_max: float = _RECONNECT_SECONDS) -> TcpTrainersPort:
        """Wait for the next job, and serve it."""
        self.until(lambda: self.listener.next_job() is not None, "a job to come")
        hello = self.listener.next_job()
        assert hello is not None
        self.port = TcpTrainersPort(
            self.reactor, hello, reconnect_seconds_max=reconnect_seconds_max, start_seconds_max=SECONDS_MAX
        )
        self.listener.open_job(self.port)
        return self.port

    def close(self) -> None:
        """Close every connection."""
        if self.port is not None:
            self.port.close()
        self.listener.close()
