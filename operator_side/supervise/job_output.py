"""What the processes of an attempt say: told apart by mpirun's tags, kept in a file each, searched for exceptions.

mpirun --output tag ─► [1,3]<stderr>: text ─► attempt-002/rank-3.log     and on to our own stdout or stderr
                       [1,3]<stderr>: <01>holdfast {"ended": …} ─► Began, Ended, Restored, Stepped
                       text of mpirun's own ─► attempt-002/mpirun.log
"""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from holdfast.supervised import MARK
from operator_side.supervise.supervisor_messages import (
    Ended,
    Event,
    Joined,
    Noticed,
    ProcessBegan,
    RankRestored,
    RankSilence,
    StepDurable,
    Stepped,
    StepStaged,
)

Report = ProcessBegan | Ended | RankRestored | Stepped

_TAG = re.compile(r"\[\d+,(\d+)\]<(stdout|stderr)>: ?")
_LINE_BYTES_MAX = 1 << 20  # a progress bar that never ends its line
_TAIL_LINES = 60
_RANK_MAX = 1 << 24
_TORCH_PREFIX = re.compile(r"\[rank\d+\]: ")  # torch.distributed puts it before each line of a traceback
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?::.*)?")


class OutputLine(NamedTuple):
    """One line of a process (`rank` None: of mpirun itself)."""

    rank: int | None
    stream: str
    text: str


def parse_line(text: str) -> OutputLine:
    """Take mpirun's tag off."""
    match = _TAG.match(text)
    if match is None:
        return OutputLine(None, "stderr", text)
    return OutputLine(int(match[1]), match[2], text[match.end() :])


def parse_report(text: str) -> Report | None:
    """What a rank, or the process around it, said (holdfast/supervised.py); None if it is no such line."""
    if not text.startswith(MARK):
        return None
    try:
        ((kind, fields),) = json.loads(text[len(MARK) :]).items()
        rank = fields["rank"]
        if type(rank) is not int or not 0 <= rank < _RANK_MAX:
            return None
        if kind == "began":
            return ProcessBegan(rank, str(fields["host"])[:255])
        if kind == "ended" and type(fields["status"]) is int:
            return Ended(rank, fields["status"])
        if kind in {"restored", "stepped"} and type(fields["step"]) is int:
            return (RankRestored if kind == "restored" else Stepped)(rank, fields["step"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return None


def exception_of(lines: list[str]) -> str:
    """The exception that the last traceback in these lines ends with, such as `torch.OutOfMemoryError`; or nothing."""
    found, inside = "", False
    for line in lines:
        line = _TORCH_PREFIX.sub("", line)
        if line.startswith("Traceback (most recent call last):"):
            inside = True
        elif inside and line and not line[0].isspace():
            match = _EXCEPTION.fullmatch(line.rstrip())
            if match is not None:
                found = match[1]
            inside = False
    return found


class Output:
    """The logs of one attempt.

    Args:
        directory: Where the files go; made if needed.
        ranks: Trainers; the process after them is the stager.
        relay: Called with (stream, text) for each line to be shown as well.
    """

    def __init__(self, directory: Path, ranks: int, relay: Callable[[str, str], None]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._ranks, self._relay = ranks, relay
        self._files: dict[int | None, IO[str]] = {}
        self._tails: dict[int | None, deque[str]] = {}
        self._rest = b""

    def feed(self, data: bytes) -> list[Report]:
        """Take what mpirun said; empty: that was all. Gives what was reported."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > _LINE_BYTES_MAX):
            lines.append(self._rest)
            self._rest = b""
        found = []
        for raw in lines:
            line = parse_line(raw.decode(errors="replace"))
            report = parse_report(line.text) if line.rank is not None else None
            if report is None:
                self._keep(line)
            elif report.rank == line.rank:  # nobody speaks for somebody else
                found.append(self._with_exception(report))
        return found

    def path(self, rank: int | None) -> Path:
        """The file of a process."""
        if rank is None:
            return self.directory / "mpirun.log"
        return self.directory / ("stager.log" if rank == self._ranks else f"rank-{rank}.log")

    def tail(self, rank: int | None, lines_max: int = 25) -> list[str]:
        """The last lines of a process."""
        return list(self._tails.get(rank, ()))[-lines_max:]

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _with_exception(self, report: Report) -> Report:
        if isinstance(report, Ended) and report.status > 0:
            return report._replace(exception=exception_of(list(self._tails.get(report.rank, ()))))
        return report

    def _keep(self, line: OutputLine) -> None:
        if line.rank is not None and line.rank > self._ranks:
            line = OutputLine(None, line.stream, line.text)
        tail = self._tails.setdefault(line.rank, deque(maxlen=_TAIL_LINES))
        if not line.text and not (tail and tail[-1]):
            return  # our own reports begin with an empty line
        tail.append(line.text)
        file = self._files.get(line.rank)
        if file is None:
            file = self._files[line.rank] = self.path(line.rank).open("a", encoding="utf-8", buffering=1)
        file.write(line.text + "\n")
        self._relay(line.stream, line.text)


_READ_BYTES = 1 << 20


class Follower:
    """Reads what is appended to a file after now, whole lines only. The file may come later."""

    def __init__(self, path: Path) -> None:
        self._path, self._rest = path, b""
        try:
            self._offset = path.stat().st_size
        except OSError:
            self._offset = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """The new lines that are JSON objects."""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0  # it was begun anew
                file.seek(self._offset)
                data = file.read(_READ_BYTES)
        except OSError:
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LINE_BYTES_MAX:
            self._rest = b""
        for line in lines:
            try:
                said = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(said, dict):
                yield said


def meaning(said: dict[str, Any]) -> Event | None:
    """What one line means to a supervisor; None: nothing."""
    step, role = said.get("step"), said.get("role")
    if type(step) is int:
        match said.get("event"), role:
            case "staged", "stager":
                return StepStaged(step)
            case "durable" | "recovered", "flusher":
                return StepDurable(step)
        return None
    rank, told = said.get("silent_rank"), said.get("told_rank")
    match said.get("event"), role:
        case "rank_silent" | "rank_back" as event, "stager" if type(rank) is int:
            return RankSilence(rank, over=event == "rank_back")
        case "stager_ready", "stager":
            return Joined()
        case "notice", "stager" if type(told) is int and said.get("kind") == "terminate":
            return Noticed(told)  # a host of which AWS recommends to leave it mostly lives on
    return None
