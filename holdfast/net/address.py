"""Addresses as people write them: `HOST:PORT`, `[::1]:29411`."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

_PORT_MAX = 65_535


class Address(NamedTuple):
    """Where a stager listens."""

    host: str  # a name, or an IPv4 or IPv6 address without brackets
    port: int  # 0 to 65535; a listener takes 0 for any free port

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether the host is `localhost` or a loopback address; False for other names, which are not resolved."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # any other name may resolve to another machine
            return False


def parse_address(text: str) -> Address:
    """Parse `HOST:PORT`. Raises `ValueError`, whose message is only what was expected, without `text`."""
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""  # an IPv6 address without brackets: the port is ambiguous
    if not (colon and host and host.isprintable() and " " not in host):
        raise ValueError("HOST:PORT, such as stager-0:29411 or [fd00::1]:29411")
    if not (port.isascii() and port.isdecimal() and int(port) <= _PORT_MAX):
        raise ValueError(f"a port from 0 to {_PORT_MAX} after the last colon")
    return Address(host, int(port))
