"""Recognizes exceptions of holdfast, gloo, NCCL and torchrun that mean another process of the job is gone."""

from __future__ import annotations

import re

_NAMES = frozenset(
    {
        "PeerLost",
        "DistNetworkError",
        "DistStoreError",
        "RendezvousClosedError",
        "RendezvousConnectionError",
        "RendezvousTimeoutError",
    }
)
_OF_COLLECTIVES = frozenset({"RuntimeError", "DistBackendError"})
_CONNECTION = re.compile(
    r"Connection (?:closed|reset) by peer|remote process exited|ncclRemoteError|Broken pipe|Socket closed"
    r"|Timed out waiting \d+ms for (?:recv|send) operation|Watchdog caught collective operation timeout"
)


def is_lost_connection(text: str) -> bool:
    """Whether this is a message of gloo, NCCL or its watchdog about a lost connection to another process."""
    return bool(_CONNECTION.search(text))


def is_lost_peer(name: str, text: str) -> bool:
    """Whether an exception with this class name, such as `RuntimeError`, and this text is about a lost process."""
    return name in _NAMES or (name in _OF_COLLECTIVES and is_lost_connection(text))
