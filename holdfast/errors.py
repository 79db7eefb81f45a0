"""All errors that holdfast raises on purpose, one class for each way to handle them.

    HoldfastError
    ├── ConfigError        a person must fix a setting                        exit 2
    ├── StateError         the user must fix the state that is to be saved    exit 3
    │   └── ResumeDiffers  the first step after a resume differs              exit 12
    ├── StoreError         the operator fixes the store, or holdfast retries  exit 4
    │   └── StoreMissing   there is no such object, step or run               exit 5
    ├── DamageError        bytes have changed; take another copy              exit 6
    ├── ProtocolError      a peer sent what the protocol does not allow       exit 7
    ├── FencedError        another writer owns this run; stop                 exit 8
    ├── PeerLost           a peer died or missed a deadline                   exit 9
    ├── BusyError          there is no room; the step is declined             exit 10
    └── NotDurable         the job ends, and its newest checkpoint is not safe  exit 11

Each class has a stable `code` (for logs and `--json`) and the exit code of the command line; a StoreError also says
whether a retry may help. Messages name what failed, where, what was expected, what was found, and what to do. `code` is
also a section of docs/troubleshooting.md; every error that ends a command or a script points there.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BusyError",
    "ConfigError",
    "DamageError",
    "FencedError",
    "HoldfastError",
    "NotDurable",
    "PeerLost",
    "ProtocolError",
    "ResumeDiffers",
    "StateError",
    "StoreError",
    "StoreMissing",
]


_PAGE = "docs/troubleshooting.md"


def help_for(topic: str) -> str:
    """Name the command that explains an error, and its section of docs/troubleshooting.md.

    Args:
        topic: Name of that section: the `code` of an error class, or `run`.
    """
    return f"holdfast explain {topic} ({_PAGE}#{topic})"


class HoldfastError(Exception):
    """Base class of all errors that holdfast raises on purpose; only its subclasses are raised.

    A traceback ends with a note that says where to read about causes and fixes; `str()` is the message alone.
    """

    code: ClassVar[str] = "holdfast"
    exit_code: ClassVar[int] = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note(f"help: {self.help}")

    @property
    def help(self) -> str:
        """Where to read about causes and fixes of errors of this class, see `help_for`."""
        return help_for(self.code)


class ConfigError(HoldfastError):
    """A setting, an argument or the environment is wrong, and a person must fix it."""

    code = "config"
    exit_code = 2


class StateError(HoldfastError):
    """The state cannot be saved or restored as it is; the message names the path in the state."""

    code = "state"
    exit_code = 3


class ResumeDiffers(StateError):
    """The first step after a resume differs from the same step of the run before, and `on_unproven` is `stop`."""

    code = "resume_differs"
    exit_code = 12


class StoreError(HoldfastError):
    """The store refused a call, or a call to it failed.

    Args:
        message: The call that failed, with the URL and the cause.
        retriable: Whether the same call may succeed later. False for a missing permission, a missing bucket or a full
            disk: waiting does not fix these.
        begin_anew: Whether a new upload of the same bytes may succeed although this upload cannot: the bytes written so
            far are lost or cannot be trusted (a failed sync, a temporary file that was removed, another writer's file
            at the name). If `retriable` is set too, retry the same call first.
        retry_after_seconds: Seconds for which the store asked not to be called again; 0 if it did not ask.
        no_room: Whether the store is full or a quota is exhausted, so that removing objects helps.
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
    """The store has no such object, step or run."""

    code = "missing"
    exit_code = 5


class DamageError(HoldfastError):
    """Bytes differ from those that were written: a CRC, a size or a structure is wrong."""

    code = "damage"
    exit_code = 6


class ProtocolError(HoldfastError):
    """A peer (frame, journal, message) sent what the protocol does not allow."""

    code = "protocol"
    exit_code = 7


class FencedError(HoldfastError):
    """Another writer holds this run or has taken it over, so this process must stop writing to the run."""

    code = "fenced"
    exit_code = 8


class PeerLost(HoldfastError):
    """A peer died or missed its deadline; the message says who waited for whom, and how long."""

    code = "peer_lost"
    exit_code = 9


class BusyError(HoldfastError):
    """There is no room, or the previous step is still in flight; this step is declined, and training continues."""

    code = "busy"
    exit_code = 10


class NotDurable(HoldfastError):
    """The training script ended, but its newest step to be saved is not durable; start the job again."""

    code = "not_durable"
    exit_code = 11
