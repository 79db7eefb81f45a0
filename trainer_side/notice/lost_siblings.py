"""SIGTERM by which torchrun ends the remaining ranks when one of them has died: it is no preemption notice.

    SIGTERM ─► is a rank of this torchrun gone? ─ no ─► a notice (signals.py)
                                                └ yes ─► this rank ends at once, as it would without a watch

No step of all ranks can be saved any more, and torchrun restarts ranks only after the last one has ended. A rank may
wait for the dead one on its device for ever, where Python handles no signal; so a thread learns of SIGTERM by the
wakeup descriptor. Ranks of other machines are not checked: after their end this rank waits at most as after a notice.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer_side.background_thread import BackgroundThread

_log = logging.getLogger("holdfast.trainer.watch")

_PARENT_FIELD = 1  # of /proc/PID/stat, counted from behind the command's name
_UP_MAX = 2  # the rank ─► a wrapper around it ─► torchrun
_SIGNALS_MAX = 64
_NO_DESCRIPTOR = -1
_CLOSE_SECONDS_MAX = 5.0


def find_sibling_ranks(process: int, ranks: int) -> list[int]:
    """Find the processes of the other ranks of the torchrun that has started `process`, or of wrappers around them; it
    has `ranks` on this machine.
    """
    for _ in range(_UP_MAX):
        parent = _parent(process)
        others = [pid for pid in _children(parent) if pid != process and _is_rank(pid)]
        if others and len(others) == ranks - 1:
            return others
        process = parent
    return []


class LostSiblings:
    """Ends this process when SIGTERM comes after another rank has ended. Made and used by the main thread."""

    def __init__(self, siblings: Sequence[int], *, rank: int) -> None:
        self._rank = rank
        self._exit_poll = select.poll()
        self._descriptors: list[int] = []
        for pid in siblings:
            with contextlib.suppress(OSError):  # it has ended already, and torchrun knows
                self._descriptors.append(os.pidfd_open(pid))
                self._exit_poll.register(self._descriptors[-1], select.POLLIN)
        self._is_default: Callable[[], bool] = lambda: False
        self._read_end, self._write_end = socket.socketpair()
        self._write_end.setblocking(False)
        before = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        if before != _NO_DESCRIPTOR:  # asyncio's; it stays
            signal.set_wakeup_fd(before)
        # A forked child must not report its signals to this process.
        os.register_at_fork(after_in_child=self._clear_wakeup_fd)
        self._thread = BackgroundThread(
            "holdfast-siblings",
            self._run,
            rank=rank,
            task="distinguishes a notice from the end of another rank",
            on_death=lambda _: None,  # without it, SIGTERM always counts as a notice
        )

    def any_ended(self) -> bool:
        """Whether another rank has ended. Any thread; also from a signal handler."""
        return bool(self._exit_poll.poll(0))

    def start(self, is_default: Callable[[], bool]) -> None:
        """Start to act on SIGTERM, where it `is_default` to end this process: the script has no handler of its own."""
        self._is_default = is_default
        self._thread.start()

    def close(self) -> None:
        """Stop acting on SIGTERM."""
        self._clear_wakeup_fd()
        self._exit_poll = select.poll()  # a poll would report closed descriptors as readable
        self._write_end.close()
        self._thread.join(_CLOSE_SECONDS_MAX)
        self._read_end.close()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _clear_wakeup_fd(self) -> None:
        if self._write_end.fileno() == _NO_DESCRIPTOR:  # closed before
            return
        with contextlib.suppress(ValueError):  # not the main thread
            now = signal.set_wakeup_fd(_NO_DESCRIPTOR)
            if now not in (_NO_DESCRIPTOR, self._write_end.fileno()):
                signal.set_wakeup_fd(now)  # a descriptor that other code has set later

    def _run(self) -> None:
        while numbers := self._read_end.recv(_SIGNALS_MAX):
            if signal.SIGTERM in numbers and self.any_ended() and self._is_default():
                _log.warning(
                    "rank %d: SIGTERM came after another rank of this torchrun had ended, so no step of all ranks can "
                    "be saved: this rank ends",
                    self._rank,
                )
                # Not by `signal`, which needs the main thread: that one may wait for the dead rank for ever.
                ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(0))
                os.kill(os.getpid(), signal.SIGTERM)


def _parent(process: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[_PARENT_FIELD])
    return 0


def _children(process: int) -> list[int]:
    return [
        int(path.name)
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and _parent(int(path.name)) == process
    ]


def _is_rank(process: int) -> bool:
    with contextlib.suppress(OSError):
        names = {
            entry.partition(b"=")[0] for entry in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        }
        return {b"TORCHELASTIC_RUN_ID", b"LOCAL_RANK"} <= names
    return False
