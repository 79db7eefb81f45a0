"""The output of an attempt: split by mpirun's tags, written to one file per process, searched for exceptions.

mpirun --output tag ─► [1,3]<stderr>: text ─► attempt-002/rank-3.log     and to stdout or stderr of this command
                       [1,3]<stderr>: <01>holdfast {"ended": …} ─► ProcessStarted, ProcessExited, RankRestored, …
                       output of mpirun itself ─► attempt-002/mpirun.log
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.shares import WHOLE, ShareNumber
from holdfast.supervised import FINAL_ERROR, MARK
from holdfast.wire.step_proof import ResumeProof
from operator_side.supervise import supervisor_messages as messages

_TAG = re.compile(r"\[\d+,(\d+)\]<(stdout|stderr)>: ?")
_LINE_BYTES_MAX = 1 << 20  # a progress bar may never end its line
_TAIL_LINES, _SHOWN_LINES = 60, 25
_RANK_MAX = 1 << 24
_TORCH_PREFIX = re.compile(r"\[rank\d+\]: ")  # torch.distributed puts it before each line of a traceback
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?::.*)?")


class OutputLine(NamedTuple):
    """One line of output of a process; `rank=None` is mpirun itself."""

    rank: int | None
    stream: str
    text: str


def parse_line(text: str) -> OutputLine:
    """Split a line into mpirun's tag and the text."""
    match = _TAG.match(text)
    if match is None:
        return OutputLine(None, "stderr", text)
    return OutputLine(int(match[1]), match[2], text[match.end() :])


def parse_report(text: str) -> messages.Report | None:
    """Parse a report of a rank or of its wrapper (holdfast/supervised.py); None if the line is not a report."""
    if not text.startswith(MARK):
        return None
    try:
        ((kind, fields),) = json.loads(text[len(MARK) :]).items()
        rank = fields["rank"]
        if type(rank) is not int or not 0 <= rank < _RANK_MAX:
            return None
        if kind == "began":
            return messages.ProcessStarted(rank, str(fields["host"])[:255])
        if kind == "ended" and type(fields["status"]) is int:
            is_oom = fields.get("out_of_memory") is True
            return messages.ProcessExited(rank, fields["status"], out_of_memory=is_oom)
        if kind == "stepped" and type(fields["step"]) is int:
            return messages.RankStepped(rank, fields["step"])
        if kind == "proof" and type(fields["step"]) is int:
            return messages.ResumeCompared(rank, fields["step"], ResumeProof.from_json(fields))
        if kind == "restored" and type(fields["step"]) is int:
            attempt, before = fields.get("attempt", 0), fields.get("before")
            if type(attempt) is int:
                fallback = None if before is None else CheckpointId.from_label(before)
                return messages.RankRestored(rank, fields["step"], attempt, fallback)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return None


def find_exception(lines: list[str]) -> str:
    """Return the exception of the last traceback in these lines, such as `torch.OutOfMemoryError`, or ""."""
    found, inside = "", False
    for line in lines:
        line = _TORCH_PREFIX.sub("", line)
        if words := FINAL_ERROR.match(line):
            found, inside = f"holdfast.errors.{words[1]}", False
        elif line.startswith("Traceback (most recent call last):"):
            inside = True
        elif inside and line and not line[0].isspace():
            match = _EXCEPTION.fullmatch(line.rstrip())
            if match is not None:
                found = match[1]
            inside = False
    return found


class Output:
    """The log files of one attempt: of its `ranks` trainers, then of the stagers. `relay`: shows (stream, text)."""

    def __init__(
        self, directory: Path, ranks: int, relay: Callable[[str, str], None], *, stagers: int = 1
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._ranks, self._stagers, self._relay = ranks, stagers, relay
        self._files: dict[int | None, IO[str]] = {}
        self._tails: dict[int | None, deque[str]] = {}
        self._rest = b""

    def feed(self, data: bytes) -> list[messages.Report]:
        """Process output of mpirun; empty bytes at its end. Return the reports in it."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > _LINE_BYTES_MAX):
            lines.append(self._rest)
            self._rest = b""
        found = []
        for raw in lines:
            line = parse_line(raw.decode(errors="replace"))
            report = parse_report(line.text) if line.rank is not None else None
            if report is None:
                self._write_line(line)
            elif report.rank == line.rank:  # a process may only report on itself
                if isinstance(report, messages.ProcessExited) and report.status > 0:
                    tail = list(self._tails.get(report.rank, ()))
                    report = report._replace(exception=find_exception(tail))
                found.append(report)
        return found

    def path(self, rank: int | None) -> Path:
        if rank is None:
            return self.directory / "mpirun.log"
        if rank < self._ranks:
            return self.directory / f"rank-{rank}.log"
        number = "" if self._stagers == 1 else f"-{rank - self._ranks + 1}"
        return self.directory / f"stager{number}.log"

    def tail(self, rank: int | None) -> list[str]:
        return list(self._tails.get(rank, ()))[-_SHOWN_LINES:]

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _write_line(self, line: OutputLine) -> None:
        if line.rank is not None and line.rank >= self._ranks + self._stagers:
            line = OutputLine(None, line.stream, line.text)
        tail = self._tails.setdefault(line.rank, deque(maxlen=_TAIL_LINES))
        if not line.text and not (tail and tail[-1]):
            return  # each holdfast report is preceded by an empty line
        tail.append(line.text)
        file = self._files.get(line.rank)
        if file is None:
            file = self._files[line.rank] = self.path(line.rank).open("a", encoding="utf-8", buffering=1)
        file.write(line.text + "\n")
        self._relay(line.stream, line.text)


def parse_event(line: dict[str, Any]) -> messages.LogEvent | None:
    """Translate one line of an event log into an event for the core; None if the core needs none."""
    step, role = line.get("step"), line.get("role")
    if type(step) is int:
        match line.get("event"), role:
            case "staged", "stager":
                share = line.get("share")  # of one of several stagers
                with contextlib.suppress(ValueError):
                    number = WHOLE if share is None else ShareNumber.from_text(str(share))
                    return messages.StepStaged(step, number)
            case "durable" | "recovered", "flusher":
                attempt = line.get("attempt")
                return messages.StepDurable(step, attempt if type(attempt) is int else 0)
        return None
    rank, noticed, lost = line.get("silent_rank"), line.get("told_rank"), line.get("lost_rank")
    match line.get("event"), role:
        case "rank_silent" | "rank_back" as event, "stager" if type(rank) is int:
            return messages.RankSilence(rank, is_over=event == "rank_back")
        case "rank_lost", "stager" if type(lost) is int:
            return messages.RankDead(lost)
        case "stager_ready", "stager":
            return messages.AllJoined()
        case "notice", "stager" if type(noticed) is int and line.get("kind") == "terminate":
            return messages.RankNoticed(noticed)  # after a rebalance recommendation most hosts stay alive
    return None
