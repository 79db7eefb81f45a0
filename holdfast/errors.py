"""Every error that holdfast raises on purpose, named by what its handler does next.

    HoldfastError
    ├── ConfigError        the operator mends a setting                       exit 2
    ├── StateError         the user mends the state that is to be saved       exit 3
    ├── StoreError         the operator mends the store, or we retry          exit 4
    │   └── StoreMissing   there is no such object or run                     exit 5
    ├── DamageError        bytes are not what they were; take another copy    exit 6
    ├── ProtocolError      a peer sent what the protocol does not allow       exit 7
    ├── FencedError        another writer owns this run; stop                 exit 8
    ├── PeerLost           a peer died or missed a deadline                   exit 9
    └── BusyError          no room or still busy; the step is declined        exit 10

Each class carries a stable `code` (for logs and `--json`), the exit code of the command line, and whether trying the
same thing again may help. Messages name what, where, expected, got, and what to do next. The code names a section of
docs/troubleshooting.md as well: what ends a command or a training script says where it is.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BusyError",
    "ConfigError",
    "DamageError",
    "FencedError",
    "HoldfastError",
    "PeerLost",
    "ProtocolError",
    "StateError",
    "StoreError",
    "StoreMissing",
]


_PAGE = "docs/troubleshooting.md"


def help_for(topic: str) -> str:
    """The command that shows causes and cures on any machine, and their place in the pages.

    Args:
        topic: A section of the page: the code of an error, or `run`.
    """
    return f"holdfast explain {topic} ({_PAGE}#{topic})"


class HoldfastError(Exception):
    """Base of all errors raised on purpose. Never raised itself.

    A traceback of one ends with a line that says where its causes and cures are; `str()` is the message alone.
    """

    code: ClassVar[str] = "holdfast"
    exit_code: ClassVar[int] = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note(f"help: {self.help}")

    @property
    def help(self) -> str:
        """Where causes and cures of errors of this class are, as `help_for` names it."""
        return help_for(self.code)


class ConfigError(HoldfastError):
    """A setting, argument or environment is wrong, and a person must mend it."""

    code = "config"
    exit_code = 2


class StateError(HoldfastError):
    """The state handed over cannot be saved as it is; the message names the path in the state."""

    code = "state"
    exit_code = 3


class StoreError(HoldfastError):
    """The store refused or failed. `retriable` says whether the same call may succeed later.

    Args:
        message: What failed, naming the URL and the cause.
        retriable: False for permission, missing bucket, full disk: nothing that waiting mends by itself.
        begin_anew: What this upload wrote is lost or cannot be trusted (a failed sync, a swept temporary file,
            another writer's file at the name): no call on it helps, a new upload of the same bytes may. With
            `retriable` too, so only if trying again was in vain.
        retry_after_seconds: The store asked not to be called again before so long; 0 where it did not.
        no_room: The store is full, or a quota is exhausted: removing something helps.
    """

    code = "store"
    exit_code = 4

    def __init__(
        self,
        message: str,
        *,
        retriable: bool = False,
        begin_anew: bool = False,
        retry_after_seconds: float = 0.0,
        no_room: bool = False,
    ) -> None:
        super().__init__(message)
        self.retriable = retriable
        self.begin_anew = begin_anew
        self.retry_after_seconds = retry_after_seconds
        self.no_room = no_room


class StoreMissing(StoreError):
    """There is no such object, step or run."""

    code = "missing"
    exit_code = 5


class DamageError(HoldfastError):
    """Bytes differ from what was written: a CRC, a size or a structure does not hold."""

    code = "damage"
    exit_code = 6


class ProtocolError(HoldfastError):
    """A peer (frame, journal, message) sent what the protocol does not allow."""

    code = "protocol"
    exit_code = 7


class FencedError(HoldfastError):
    """Another writer holds this run, or took it over; this one must not write any more."""

    code = "fenced"
    exit_code = 8


class PeerLost(HoldfastError):
    """A peer died or missed its deadline; the message says who waited for whom, and how long."""

    code = "peer_lost"
    exit_code = 9


class BusyError(HoldfastError):
    """There is no room, or the one before is still under way; this step is declined, training goes on."""

    code = "busy"
    exit_code = 10
