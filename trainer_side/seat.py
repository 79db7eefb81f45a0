"""The seat of this process in its job: one Checkpointer has it, in the process that made it.

    Checkpointer(…) ─► seat claimed ── close() ─► released
                          ├─ a second Checkpointer beside it ───────────► ConfigError, which names the first
                          └─ a forked child: step(), save(), restore() ─► ConfigError; close() does nothing there

A process joins a job with a stager once: after `close()` the stager knows that the rank has left, so another
Checkpointer is refused.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

from holdfast.errors import ConfigError
from trainer_side.ranks.ports import StagerPort

_PACKAGE = Path(__file__).parent


class Seat:
    """The seat of one Checkpointer. Training thread. `names`: Those of the state, for messages.

    Attributes:
        process: Id of the process that made the Checkpointer; another process is a forked child.

    Raises:
        ConfigError: Another Checkpointer of this process is open; or the process is a forked child of one that has one.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names, self.process, self._location = list(names), os.getpid(), _script_location()
        for seat in _seats:
            if seat.process != self.process:
                raise ConfigError(
                    f"Checkpointer(...) in process {self.process}, a forked child of process {seat.process}, which "
                    f"has {seat}; make it in the process that the launcher has started, or start the child with "
                    "multiprocessing's method 'spawn'"
                )
            if seat._owner() is not None:
                raise ConfigError(
                    f"Checkpointer(...): this process has {seat}, which is open; a rank has one: put all objects into "
                    "its state, or call close() of the first before"
                )
        self._owner: Callable[[], object] = lambda: None
        self._release_in_child: Callable[[], object] = lambda: None

    def __str__(self) -> str:
        return f"the Checkpointer of {', '.join(self._names) or 'an empty state'} (made at {self._location})"

    def claim(self, owner: object, release_in_child: Callable[[], object]) -> None:
        """Note that the Checkpointer `owner` is open. Once garbage-collected, it counts as closed.

        `release_in_child`: Called in each forked child, which has one thread and may hold any lock.
        """
        self._owner, self._release_in_child = weakref.ref(owner), release_in_child
        _seats.append(self)

    def release(self) -> None:
        """Note that the Checkpointer is closed."""
        if self in _seats:
            _seats.remove(self)

    def fork_error(self, call: str) -> ConfigError:
        """Return the error of `call` in a forked child, where no thread of the Checkpointer lives."""
        return ConfigError(
            f"{call} in process {os.getpid()}, a forked child of training process {self.process}: {self} works in "
            "that process alone; call it there, and not in a loader's worker or another child"
        )


_seats: list[Seat] = []  # open ones
_claimed_ports: weakref.WeakKeyDictionary[StagerPort, str] = weakref.WeakKeyDictionary()


def claim_port(port: StagerPort) -> None:
    """Note that this process now sends HELLO to the stager by `port`. ConfigError: it has done so before."""
    if port in _claimed_ports:
        raise ConfigError(
            f"Checkpointer(...): this process has joined its job before (at {_claimed_ports[port]}), and the stager "
            "was told that this rank has left; keep one Checkpointer until the end of the process, or start a new job"
        )
    _claimed_ports[port] = _script_location()


def _script_location() -> str:
    """Return the place of the script's call, such as `train.py:45`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_internal_file(Path(frame.f_code.co_filename)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_internal_file(file: Path) -> bool:
    """Whether the file belongs to holdfast, or to the compiler that is kept out of it (opaque.py)."""
    return file.is_relative_to(_PACKAGE) or file.parent.name == "_dynamo"


def _release_seats_in_child() -> None:
    for seat in _seats:
        seat._release_in_child()


os.register_at_fork(after_in_child=_release_seats_in_child)
