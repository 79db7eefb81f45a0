"""One rank, or one torchrun, under `holdfast rank`: starts it, forwards signals, and reads its reports at the end.

    signals ─► the command ─► its stderr: passed through, and its end kept      reports of the ranks: a file
                                                         └───► CommandOutcome ◄──────┘

The command has its own process group, so it gets a signal sent to this process's group once, through this process. The
command dies with this process, and inside torchrun this process dies with torchrun's agent.

SIGHUP, which a closing terminal sends, is forwarded as SIGTERM: ranks treat that as a notice. On a terminal the command
ignores SIGHUP, so that it gets only the SIGTERM; under `nohup` every process ignores it.

SIGUSR1 and SIGUSR2 kill a process that does not handle them, such as torchrun. This process sends them to the command
if that handles them, otherwise to the ranks that have reported and handle them, and keeps them until one does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast.errors import ConfigError
from holdfast.process import (
    ENDING_SIGNALS,
    count_oom_kills,
    parent_of,
    set_parent_death_signal,
    wait_readable,
)
from holdfast.supervised import REPORTS_VARIABLE, own_rank
from holdfast.telemetry.event_follower import json_objects
from operator_side.supervise.exit_codes import CommandOutcome

_FORWARDED = (*ENDING_SIGNALS, signal.SIGQUIT)
_DEFERRED = (signal.SIGUSR1, signal.SIGUSR2)
_TAIL_BYTES = 1 << 16
_READ_BYTES = 1 << 16
_POLL_SECONDS = 0.1
_REPORTS_BYTES_MAX = 16 << 20  # a rank writes six lines at most, and one more for each notice
_STDIN, _STDERR = 0, 2


class WrappedRank:
    """Runs the command. Only for the main thread: it handles signals, and the kernel ties the command to it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._received: set[int] = set()
        self._deferred: set[int] = set()  # signals kept until a process handles them
        self._has_reported_deferred = False
        self._pending: list[int] = []  # received before the command was started
        self._tail = b""
        self._process: subprocess.Popen[bytes] | None = None
        # On a terminal Ctrl-C reaches the whole foreground group, and only that group may read.
        self._own_group = not os.isatty(_STDIN)

    def run(self) -> CommandOutcome:
        """Run the command to its end; ignore signals from then on. Raises `ConfigError`: the command cannot start."""
        if "TORCHELASTIC_RUN_ID" in os.environ:
            set_parent_death_signal()  # the rank below does the same, and this process is its parent
        killed_before = count_oom_kills()
        for number in (*_FORWARDED, *_DEFERRED):
            signal.signal(number, self._forward)
        try:
            with _reports_file() as path:
                process = self._start(path)
                status = self._relay(process, path)
                reports = list(_read_reports(path))
        finally:
            # A signal that comes too late for the command must not replace this process's exit code.
            for number in (*_FORWARDED, *_DEFERRED):
                signal.signal(number, signal.SIG_IGN)
        name, host = Path(self._command[0]).name, os.uname().nodename
        forwarded, tail = frozenset(self._received), self._tail.decode(errors="replace")
        is_oom = count_oom_kills() > killed_before
        return CommandOutcome(name, host, own_rank(), process.pid, status, forwarded, reports, tail, is_oom)

    def _start(self, reports: Path) -> subprocess.Popen[bytes]:
        try:
            # Safe: this process has one thread, and the function only makes two system calls.
            self._process = subprocess.Popen(
                self._command,
                stderr=subprocess.PIPE,
                env=self._environment(reports),
                process_group=0 if self._own_group else None,
                preexec_fn=self._prepare,  # noqa: PLW1509
            )
        except OSError as error:
            raise ConfigError(
                f"{self._command[0]}: this command cannot be started on {os.uname().nodename}: {error.strerror}; "
                "check its path"
            ) from error
        while self._pending:
            self._process.send_signal(self._pending.pop(0))
        return self._process

    def _environment(self, reports: Path) -> dict[str, str]:
        env = {**os.environ, REPORTS_VARIABLE: str(reports)}
        if not self._own_group:  # torchrun is the only launcher that handles SIGHUP even if it is ignored
            env.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")
        return env

    def _prepare(self) -> None:
        set_parent_death_signal()
        if not self._own_group:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _relay(self, process: subprocess.Popen[bytes], reports: Path) -> int:
        """Pass stderr through until the command has ended. Its children may hold the pipe open after that."""
        assert process.stderr is not None
        with process.stderr:
            descriptor = process.stderr.fileno()
            os.set_blocking(descriptor, False)
            is_open, status = True, None
            while status is None:
                if self._deferred:
                    self._send_deferred(process.pid, reports)
                if is_open:
                    wait_readable([descriptor], _POLL_SECONDS)
                    is_open = self._copy(descriptor)
                    status = process.poll()
                else:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        status = process.wait(_POLL_SECONDS)
            while is_open and self._copy(descriptor, more=True):
                pass
        return status

    def _copy(self, descriptor: int, *, more: bool = False) -> bool:
        """Copy the available stderr. Return whether the pipe is still open; with `more`: whether there was data."""
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return not more
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        with contextlib.suppress(OSError):  # the reader of this process's stderr is gone
            view = memoryview(data)
            while view:
                view = view[os.write(_STDERR, view) :]
        return bool(data)

    def _forward(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP:
            if signal.SIGTERM in self._received:  # the shell repeats the kernel's SIGHUP to all
                return
            number = signal.SIGTERM
        self._received.add(number)
        if number == signal.SIGINT and not self._own_group:
            return
        if number in _DEFERRED:
            self._deferred.add(number)
        elif self._process is None:
            self._pending.append(number)
        else:
            self._process.send_signal(number)

    def _send_deferred(self, command: int, reports: Path) -> None:
        """Send SIGUSR1 and SIGUSR2 to processes that survive them, if there are any by now."""
        ranks = {report["pid"] for report in _read_reports(reports) if isinstance(report.get("pid"), int)}
        for number in list(self._deferred):
            below = [rank for rank in ranks if _is_descendant(rank, command) and _handles(rank, number)]
            targets = [command] if _handles(command, number) else below
            for pid in targets:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if targets:
                self._deferred.discard(number)
        if self._deferred and not self._has_reported_deferred:
            self._has_reported_deferred = True
            names = ", ".join(sorted(signal.Signals(number).name for number in self._deferred))
            sys.stderr.write(
                f"holdfast rank: {names} is kept: no process of this job handles it yet; ranks do where the setting "
                "watch names it, from Checkpointer(...) on\n"
            )
            sys.stderr.flush()


def _handles(pid: int, number: int) -> bool:
    """Whether the process catches or ignores the signal, and so survives it."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, mask = line.partition(":")
            if name in ("SigCgt", "SigIgn") and int(mask, 16) >> (number - 1) & 1:
                return True
    return False


def _is_descendant(pid: int, ancestor: int) -> bool:
    """Whether `pid` is `ancestor` or one of its descendants."""
    while pid > 1 and pid != ancestor:
        pid = parent_of(pid)
    return pid == ancestor


@contextlib.contextmanager
def _reports_file() -> Iterator[Path]:
    try:
        descriptor, name = tempfile.mkstemp(prefix="holdfast-rank-")
    except OSError as error:
        raise ConfigError(
            f"no file can be made in {tempfile.gettempdir()}: {error.strerror}; set TMPDIR to a directory with room"
        ) from error
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _read_reports(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(OSError), path.open("rb") as file:
        yield from json_objects(file.read(_REPORTS_BYTES_MAX).splitlines())
