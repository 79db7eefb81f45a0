"""The first two messages between a rank and a stager: HELLO, and the WELCOME that answers it."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable
from typing import NamedTuple

from holdfast.errors import HoldfastError, PeerLost, ProtocolError
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind
from holdfast.wire.welcome import Welcome
from trainer_side.ranks.ports import StagerPort

_log = logging.getLogger("holdfast.trainer")

_PAUSE_SECONDS = 1e-3
_DISCONNECT_SECONDS_MAX = 5.0
_QUIET_SECONDS = 10.0  # first log line about the wait after this long


class GreetedStager(NamedTuple):
    """A stager that has admitted this rank: its port, its WELCOME, and its name in the log."""

    port: StagerPort
    welcome: Welcome
    name: str = "the stager"


def greet(
    port: StagerPort,
    *,
    ranks: int,
    seconds_max: float,
    pause_seconds: float = _PAUSE_SECONDS,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> GreetedStager:
    """Send HELLO, and wait for the stager's WELCOME. If that fails, leave the port.

    No other thread may use the port meanwhile. `is_cancelled`: Whether the answer is no longer wanted.

    Raises:
        PeerLost: The stager did not answer, or is lost.
        ProtocolError: The stager counts another number of ranks, or answers something else.
        HoldfastError: The stager could not start; its own error, of the same class.
    """
    hello = {"version": wire.VERSION, "pid": os.getpid(), "host": platform.node()}
    try:
        port.send(wire.encode(Kind.HELLO, body=wire.to_json(hello)))
        welcome = _await_welcome(port, seconds_max, pause_seconds, is_cancelled)
        if welcome.ranks != ranks:
            raise ProtocolError(
                f"the stager counts {welcome.ranks} training ranks, expected {ranks} as the job counts them; "
                "start all ranks by one launcher, and a stager of their own"
            )
    except HoldfastError:
        port.disconnect(_DISCONNECT_SECONDS_MAX)
        raise
    return GreetedStager(port, welcome)


def _await_welcome(
    port: StagerPort, seconds_max: float, pause_seconds: float, is_cancelled: Callable[[], bool]
) -> Welcome:
    begun = time.monotonic()
    deadline, is_logged = begun + seconds_max, False
    while time.monotonic() < deadline and not is_cancelled():
        if not is_logged and time.monotonic() - begun > _QUIET_SECONDS:
            is_logged = True
            _log.warning(
                "waiting for the stager until %s: it has not answered yet",
                time.strftime("%H:%M:%S", time.localtime(time.time() + deadline - time.monotonic())),
            )
        for message in port.poll():
            frame = wire.decode(message)
            if frame.kind is Kind.WELCOME:
                return Welcome.from_frame(frame)
            if frame.kind is not Kind.BEAT:
                raise ProtocolError(
                    f"the stager sent {frame.kind.name}, expected WELCOME first; "
                    "install the same holdfast on all machines"
                )
        time.sleep(pause_seconds)
    raise PeerLost(f"the stager did not answer within {seconds_max:g} s; look at its log")
