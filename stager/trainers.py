"""The trainers as the stager knows them: which are present, their host and process, and when each was last heard.

    HELLO ─► here ── nothing heard for rank_seconds_max ──► silent ── heard again ──► here
               └──────────── BYE, dead, broke the protocol ────┴──────────────────► gone

Except for beats, WELCOME is the first message that a rank gets: earlier broadcasts are held until then. Ranks that have
lost another stager join one after the other, and the first may save before the last has joined.

The stager sends a beat a few times within `rank_seconds_max`, and each rank answers it; every other message counts as
well. Only time in which this process listened counts: a stager that was stopped could not receive messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.telemetry.status_document import RankState, RankStatus
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind
from stager.trainers_port import TrainersPort

_BEAT_SECONDS_MAX = 5.0
_BEATS_PER_LIMIT = 4  # unanswered beats before a rank counts as silent
_STALL_SECONDS_MAX = 1.0  # of silence counted for one turn
_HOST_CHARACTERS_MAX = 255
_UNKNOWN = "unknown"


class SilentRank(NamedTuple):
    rank: int
    seconds: float  # of silence so far


@dataclass(slots=True)
class _RankRecord:
    host: str
    pid: int
    heard_at: float
    silent: bool = False
    step: int | None = None  # the newest that it has offered or declined


class Trainers:
    """Presence of the ranks, beats, and sending. `lost`: ranks that died or were dropped, without having left."""

    def __init__(
        self, port: TrainersPort, *, rank_seconds_max: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._port, self._clock = port, clock
        self._seconds_max = rank_seconds_max
        self.ranks = port.ranks
        self.present = set(range(port.ranks))
        self.lost: set[int] = set()
        self.beat_seconds = min(_BEAT_SECONDS_MAX, rank_seconds_max / _BEATS_PER_LIMIT)
        self._known: dict[
            int, _RankRecord
        ] = {}  # ranks that have said HELLO; before, they may import torch for long
        # Broadcasts held for each rank that has no WELCOME yet.
        self._held: dict[int, list[bytes]] = {rank: [] for rank in range(port.ranks)}
        self._last_turn_at = self._next_beat_at = clock()
        self._listened_seconds = 0.0

    def send(self, rank: int, message: bytes) -> None:
        self._port.send(rank, message)

    def send_all(self, message: bytes) -> None:
        """Send to every present rank; a rank that has no WELCOME yet gets the message right after it."""
        for rank in self.present:
            held = self._held.get(rank)
            if held is None:
                self._port.send(rank, message)
            else:
                held.append(message)

    def welcome(self, rank: int, message: bytes) -> None:
        """Send this WELCOME, then the broadcasts that were held for the rank."""
        for one in (message, *self._held.pop(rank, ())):
            self._port.send(rank, one)

    def handle_hello(self, rank: int, frame: Frame) -> None:
        body = wire.json_body(frame)
        host, pid = body.get("host"), body.get("pid")
        self._known[rank] = _RankRecord(
            host[:_HOST_CHARACTERS_MAX] if isinstance(host, str) and host.isprintable() else _UNKNOWN,
            pid if type(pid) is int else 0,
            self._listened_seconds,
        )

    def note_message(self, rank: int) -> SilentRank | None:
        """Note a message of this rank; return the silence that it has ended, if the rank was silent."""
        known = self._known.get(rank)
        if known is None:
            return None
        ended = SilentRank(rank, self._listened_seconds - known.heard_at) if known.silent else None
        known.heard_at, known.silent = self._listened_seconds, False
        return ended

    def set_step(self, rank: int, step: int) -> None:
        """A rank has offered or declined this step."""
        known = self._known.get(rank)
        if known is not None:
            known.step = step

    def statuses(self) -> list[RankStatus]:
        """The state of every rank, for `holdfast status`. Any thread: it copies the dicts and reads single words."""
        known, present, lost = dict(self._known), set(self.present), set(self.lost)
        return [
            _rank_status(rank, known.get(rank), rank in present, rank in lost, self._listened_seconds)
            for rank in range(self.ranks)
        ]

    def remove(self, rank: int, *, lost: bool) -> None:
        """A rank has left, is dead, or was dropped."""
        self.present.discard(rank)
        self._held.pop(rank, None)
        if lost:
            self.lost.add(rank)

    def name(self, rank: int) -> str:
        """`rank 3 on host spot-7 (process 4711)`; before HELLO only `rank 3`."""
        known = self._known.get(rank)
        return f"rank {rank}" if known is None else f"rank {rank} on host {known.host} (process {known.pid})"

    def send_beats(self, attempt: int) -> list[SilentRank]:
        """Send a beat when it is due; return the ranks that have become silent since the last call."""
        now = self._clock()
        self._listened_seconds += min(_STALL_SECONDS_MAX, now - self._last_turn_at)
        self._last_turn_at = now
        due = now >= self._next_beat_at
        if due:
            self._next_beat_at = now + self.beat_seconds
        found = []
        # No beats for a rank that has not said HELLO, or is silent and has unanswered ones: they would pile up.
        for rank in sorted(self._known.keys() & self.present):
            known = self._known[rank]
            if known.silent:
                continue
            seconds = self._listened_seconds - known.heard_at
            known.silent = seconds > self._seconds_max
            if known.silent:
                found.append(SilentRank(rank, seconds))
            elif due:
                self._port.send(rank, wire.encode(Kind.BEAT, attempt=attempt))
        return found


def _rank_status(
    rank: int, known: _RankRecord | None, is_present: bool, is_lost: bool, now: float
) -> RankStatus:
    state: RankState = "lost" if is_lost else "left"
    if is_present:
        state = "coming" if known is None else "silent" if known.silent else "here"
    if known is None:
        return RankStatus(rank=rank, state=state)
    quiet_seconds = round(max(0.0, now - known.heard_at), 3) if is_present else None
    return RankStatus(
        rank=rank, host=known.host, pid=known.pid, state=state, quiet_seconds=quiet_seconds, step=known.step
    )
