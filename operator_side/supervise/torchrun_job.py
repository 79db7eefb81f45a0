"""The job of `holdfast run --launcher torchrun` on this machine: a standing stager, and torchrun, which restarts ranks.

    stager listens ─► holdfast rank -- torchrun … ─► its end ─► stager stopped, everything durable ─► exit code
                           ▲        └─ a rank dies: torchrun starts all ranks again; they join the running stager
    first SIGTERM, Ctrl-C ─┘ SIGTERM: the ranks save once more, within `grace_seconds`      second: SIGKILL

If the stager dies, this process restarts it at the same address, and the ranks join it; if it dies too often, the ranks
are ended. `holdfast rank` around torchrun finds out why the ranks ended and sets the exit code. Each process is tied to
its parent: if this process is killed, only the stager and its flusher stay, and exit once everything staged is in the
store.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast.errors import PeerLost
from holdfast.process import ENDING_SIGNALS, wait_readable
from holdfast.telemetry.event_follower import Follower
from operator_side.supervise.exit_codes import ExitDecision
from operator_side.supervise.job_output import parse_event
from operator_side.supervise.kept_stager import KeptStager
from operator_side.supervise.supervisor_messages import StepDurable, StepStaged
from operator_side.supervise.tied import tied_command, tied_to_any_parent
from operator_side.supervise.verdict import INTERRUPTED, signal_name

_log = logging.getLogger("holdfast.run")

_POLL_SECONDS = 0.1
_LISTENS_SECONDS_MAX = 300.0
_DRAIN_SECONDS_MAX = 600.0
_SLACK_SECONDS = 15.0  # torchrun kills its ranks at the end of their grace period, and then ends itself


def torchrun_arguments(command: Sequence[str]) -> list[str]:
    """Arguments that make torchrun run a script, a module after `-m`, or a program."""
    starts_python = command[0] == "-m" or command[0].endswith(".py")
    return [*command] if starts_python else ["--no-python", *command]


def torchrun_line(command: Sequence[str], *, ranks: int, restarts_max: int) -> list[str]:
    """Command line of a single-machine torchrun, with each rank tied to it from the rank's start."""
    python = [sys.executable, "-u"] if torchrun_arguments(command)[0] != "--no-python" else []
    line = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
    line += ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts_max)]
    return [*line, "--no-python", *tied_to_any_parent([*python, *command])]


def as_supervisor_event(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Reword a stager's event as the supervisor of an mpirun job would; torchrun's job has no supervisor."""
    match line.get("role"), line.get("event"):
        case "stager", "resume_proof":
            return {**line, "role": "supervisor", "message": line.get("text")}
        case "stager", "rank_lost":
            message = (
                f"rank {line.get('lost_rank')} is lost, and torchrun restarts the ranks: {line.get('reason')}"
            )
            return {"role": "supervisor", "event": "ended", "cause": "killed", "message": message}
        case "stager", "stager_ready" if line.get("returned"):
            message = f"the ranks have returned to the stager, as attempt {line.get('attempt')}"
            return {"role": "trainer", "event": "stager_back", "message": message}
    return line


class TorchrunJob:
    """Runs stager and torchrun. Only for the main thread, because it handles signals. `environment`: gets the stager's
    address. `events`: log of stager and flusher. `grace_seconds`: for ranks told to end. `on_event`: called with
    each event; must return at once. `newest_step`: the newest staged or durable; starts as the store's, or -1.
    """

    def __init__(
        self,
        stager: KeptStager,
        line: Sequence[str],
        environment: Mapping[str, str],
        *,
        events: Path,
        newest_step: int,
        grace_seconds: float,
        on_event: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> None:
        self._on_event = on_event
        self._stager, self._line, self._environment = stager, list(line), dict(environment)
        self._follower, self._grace_seconds = Follower(events), grace_seconds
        self.newest_step = newest_step
        self._signals: list[int] = []
        self._stop_signal = 0  # the first signal that asked the job to end; 0: none
        self._kill_at = math.inf
        self._given_up: ExitDecision | None = None
        self._torchrun: subprocess.Popen[bytes] | None = None

    def run(self) -> ExitDecision:
        """Run the job until none of its processes is left and everything staged is durable. The message is empty if
        `holdfast rank` has said why it ended.
        """
        before = {
            number: signal.signal(number, self._on_signal) for number in (*ENDING_SIGNALS, signal.SIGUSR1)
        }
        try:
            end = self._start() or self._watch()
            self._drain()
        finally:
            if self._torchrun is not None and self._torchrun.poll() is None:
                self._torchrun.kill()
                self._torchrun.wait()
            self._stager.close()
            self._follower.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        return end

    def _start(self) -> ExitDecision | None:
        """Start torchrun once the stager listens. Return the job's end if that fails."""
        deadline = time.monotonic() + _LISTENS_SECONDS_MAX
        while not self._stager.check_listening():
            self._handle_signals()
            status = self._stager.poll()
            if self._stop_signal:
                code = INTERRUPTED if self._stop_signal == signal.SIGINT else 128 + self._stop_signal
                message = f"ended by {signal_name(self._stop_signal)} before any rank was started"
                return ExitDecision(code, message)
            if status is not None:
                return ExitDecision(_code(status), "the stager has ended before any rank was started")
            if time.monotonic() > deadline:
                return ExitDecision(
                    PeerLost.exit_code, f"the stager does not listen within {_LISTENS_SECONDS_MAX:g} s"
                )
            time.sleep(_POLL_SECONDS)
        _log.info("the stager listens at %s; torchrun starts the ranks", self._stager.address)
        rank_command = [sys.executable, "-P", "-m", "holdfast", "rank", "--", *self._line]
        # No terminal as stdin: `holdfast rank` would join its foreground group, and Ctrl-C would reach torchrun twice.
        self._torchrun = subprocess.Popen(
            tied_command(rank_command, by=signal.SIGKILL),
            stdin=subprocess.DEVNULL,
            env={
                **self._environment,
                "HOLDFAST_STAGER": self._stager.address,
                # Not by --shutdown-timeout: the torchrun of older torch, such as 2.9, rejects it and always waits 30 s.
                "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(self._grace_seconds)),
            },
            start_new_session=True,
        )
        return None

    def _watch(self) -> ExitDecision:
        assert self._torchrun is not None
        end = os.pidfd_open(self._torchrun.pid)
        try:
            while (status := self._torchrun.poll()) is None:
                wait_readable([end], _POLL_SECONDS)
                self._handle_signals()
                self._read_event_log()
                self._check_stager()
                if time.monotonic() >= self._kill_at:
                    self._kill_at = math.inf
                    _log.warning("the ranks have not ended within their grace period; they are killed")
                    self._torchrun.kill()
        finally:
            os.close(end)
        self._read_event_log()
        if self._given_up is not None:
            return self._given_up
        if self._stop_signal == signal.SIGINT:
            return ExitDecision(INTERRUPTED, "ended by SIGINT")
        if status < 0 and self._stop_signal:
            return ExitDecision(128 + self._stop_signal, f"ended by {signal_name(self._stop_signal)}")
        return ExitDecision(_code(status))

    def _check_stager(self) -> None:
        self._stager.restart_if_due()
        status = self._stager.poll()
        if status is None or self._stop_signal or self._given_up is not None:
            return
        how = f"the stager ended with {status}"
        if status < 0:
            how = f"the stager was killed by {signal_name(-status)}"
        pause_seconds = self._stager.schedule_restart()
        if pause_seconds is None:
            times = self._stager.restarts + 1
            message = f"{how}, {times} times in a row without a newer checkpoint; the ranks are ended"
            _log.error("%s", message)
            self._given_up = ExitDecision(PeerLost.exit_code if status <= 0 else status, message)
            self._terminate_ranks()
            return
        when = f"in {pause_seconds:.1f} s" if pause_seconds else "now"
        _log.warning(
            "%s; it is started again %s at %s, and the ranks join it", how, when, self._stager.address
        )
        self._on_event({"role": "trainer", "event": "stager_lost", "message": f"{how}; it is started again"})

    def _read_event_log(self) -> None:
        for line in self._follower.read():
            self._on_event(as_supervisor_event(line))
            match parse_event(line):
                case StepStaged(step) | StepDurable(step) if step > self.newest_step:
                    self.newest_step, self._stager.restarts = step, 0

    def _drain(self) -> None:
        """Stop the stager and wait until everything staged is durable; a signal ends the wait."""
        self._signals.clear()
        self._stager.stop()
        deadline, is_logged = time.monotonic() + _DRAIN_SECONDS_MAX, False
        while not self._stager.wait_for_exit(_POLL_SECONDS):
            if not is_logged:
                is_logged = True
                _log.info("waiting until every staged checkpoint is durable")
            if set(self._signals) & set(ENDING_SIGNALS) or time.monotonic() > deadline:
                _log.warning("the flusher is still writing, and continues without this command")
                return
        self._read_event_log()
        if self._stager.has_leftover_ring:
            _log.warning(
                "not every staged checkpoint is in the store; the ring is kept: start the run again, or `holdfast "
                "flusher`, to publish them"
            )

    # -- signals ---------------------------------------------------------------------------------------------------

    def _handle_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGUSR1:  # a notice, for the ranks that watch for it
                self._send(number)
            elif not self._stop_signal:
                self._stop_signal = number
                _log.warning(
                    "received %s: the ranks have %g s to save once more; a second signal kills them",
                    signal_name(number),
                    self._grace_seconds,
                )
                self._terminate_ranks()
            elif number != signal.SIGHUP and self._torchrun is not None and self._torchrun.poll() is None:
                _log.warning("second signal: the ranks are killed")
                self._torchrun.kill()

    def _terminate_ranks(self) -> None:
        self._send(signal.SIGTERM)
        self._kill_at = time.monotonic() + self._grace_seconds + _SLACK_SECONDS

    def _send(self, number: int) -> None:
        if self._torchrun is not None:
            with contextlib.suppress(ProcessLookupError):
                self._torchrun.send_signal(number)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signals.append(number)


def _code(status: int) -> int:
    return status if status >= 0 else 128 - status
