"""Rank 0's decisions for all ranks: a pure core. Frames of the ranks go in, messages to all ranks come out.

SEALED, SKIPPED ─► Tally  ─► COMPLETE, VOID
DONE            ─► ReplicaWatch ─► VOID, where replicas differ and such steps are refused
PROPOSE, FITS   ─► LayoutRound  ─► RESERVED, or REFUSED
READY           ─► Muster ─► GO, or REFUSED
NOTICE, AT      ─► Chair  ─► SAVE_AT
ROOM            ───────────► ROOM
DOUBT           ───────────► DOUBTED
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from holdfast.errors import HoldfastError, ProtocolError
from holdfast.telemetry.causes import Reason
from holdfast.wire import frames as wire
from holdfast.wire.doubt import Doubt
from holdfast.wire.frames import Frame, Kind
from holdfast.wire.layout_agreement import LayoutRound, OneSided
from holdfast.wire.state_messages import Agreement
from trainer_side.tiers.chair import Chair
from trainer_side.tiers.replica_watch import ReplicaWatch
from trainer_side.tiers.tally import Muster, StepVerdict, Tally, read_reason

ROOT = 0

_log = logging.getLogger("holdfast.trainer.council")


class CouncilLimits(NamedTuple):
    """How long the slowest rank is waited for, in seconds: for its layout (`agree`), and for its slice (`seal`)."""

    agree_seconds_max: float
    seal_seconds_max: float


class Coordinator:
    """Rank 0 hears the ranks, itself included, and decides. Not thread-safe.

    Each method returns the messages that go to all ranks, rank 0 included, in this order.

    Args:
        ranks: Number of training ranks.
        limits: How long the slowest rank is waited for.
        chair: Names the step that all ranks save after a notice; only in a job without a stager.
        watch: Compares the replicas of the ranks.
    """

    def __init__(
        self,
        ranks: int,
        limits: CouncilLimits,
        chair: Chair | None = None,
        watch: ReplicaWatch | None = None,
    ) -> None:
        self._ranks, self._chair, self._watch = ranks, chair, watch
        self._tally = Tally(ranks, seconds_max=limits.seal_seconds_max)
        self._round = LayoutRound(ranks, limits.agree_seconds_max, who="rank 0")
        self._muster = Muster(ranks, limits.agree_seconds_max)
        self._left: set[int] = set()

    @property
    def all_left(self) -> bool:
        """Whether every rank, rank 0 included, has said BYE or is dead."""
        return len(self._left) == self._ranks

    def hear(self, rank: int, frame: Frame, now: float) -> list[bytes]:
        """Take a message of one rank.

        Raises:
            ProtocolError: The message does not hold what it should, or no rank may send it to rank 0.
        """
        order = (frame.attempt, frame.step)
        match frame.kind:
            case Kind.SEALED:
                self._tell_chair(frame)
                return self._verdicts(self._tally.sealed(rank, frame.arg, order, wire.body_text(frame), now))
            case Kind.SKIPPED:
                self._tell_chair(frame)
                if self._chair is not None and rank == ROOT:
                    self._chair.gave_up(frame.arg, order)
                return self._verdicts(self._tally.skipped(rank, frame.arg, order, read_reason(frame)))
            case Kind.DONE if self._watch is not None:
                error = self._watch.hear(rank, frame)
                return self._verdicts(self._tally.refuse(order, Reason.of_error(error))) if error else []
            case Kind.PROPOSE:
                return _answer(self._round.propose(rank, self._round.read(frame), now))
            case Kind.FITS:
                return _answer(self._round.fits(rank, frame.step))
            case Kind.READY:
                code, message = _refusal(frame)
                return _answer(self._muster.ready(rank, code, message, now))
            case Kind.ROOM if rank == ROOT:
                return [wire.encode(Kind.ROOM, arg=frame.arg)]
            case Kind.DOUBT:
                return [_doubted(rank, frame)]
            case Kind.NOTICE | Kind.AT if self._chair is not None:
                return self._chair.hear(rank, frame)
            case Kind.BYE:
                return self._rank_left(rank, "has ended", by_itself=True)
            case _:
                raise ProtocolError(f"rank {rank} sent {frame.kind.name} to rank 0, which it must not")

    def died(self, rank: int) -> list[bytes]:
        return self._rank_left(rank, "is dead")

    def tick(self, now: float) -> list[bytes]:
        if late := self._round.late(now):
            _log.warning("%s", late)
        messages = self._verdicts(self._tally.overdue(now))
        for error in (self._round.overdue(now), self._muster.overdue(now)):
            messages += _answer(error)
        return messages + (self._chair.tick() if self._chair is not None else [])

    def _tell_chair(self, frame: Frame) -> None:
        # Before the tally decides: the chair hears what the ranks say of a step before it hears the verdict.
        if self._chair is not None:
            self._chair.told(frame.arg, (frame.attempt, frame.step))

    def _rank_left(self, rank: int, why: str, *, by_itself: bool = False) -> list[bytes]:
        self._left.add(rank)
        messages = self._chair.left(rank, why) if self._chair is not None else []
        messages += self._verdicts(self._tally.lost(rank, why))
        reason = f"rank {rank} {why}"
        for error in (self._round.lost(rank, reason, by_itself=by_itself), self._muster.lost(reason)):
            messages += _answer(error)
        return messages

    def _verdicts(self, verdicts: list[StepVerdict]) -> list[bytes]:
        messages: list[bytes] = []
        for verdict in verdicts:
            messages.append(verdict.to_frame())
            if self._chair is not None:
                messages += self._chair.judged(verdict)
        return messages


def _doubted(rank: int, frame: Frame) -> bytes:
    """What all ranks hear of a rank's doubt.

    Raises:
        ProtocolError: The message does not hold what it should, or is in another rank's name.
    """
    doubt = Doubt.from_frame(frame)
    if doubt.rank != rank:
        raise ProtocolError(f"rank {rank} sent DOUBT in the name of rank {doubt.rank}")
    return doubt.to_frame(Kind.DOUBTED, attempt=frame.attempt)


def _refusal(frame: Frame) -> tuple[str, str]:
    """Code and message of a READY that refuses; both are empty where the rank is ready."""
    if not wire.json_body(frame):
        return "", ""
    body = wire.json_body(frame, code=str, message=str)
    return body["code"], body["message"]


def _answer(answer: Agreement | HoldfastError | OneSided | bool | None) -> list[bytes]:
    """What all ranks hear of a round or a muster; nothing while ranks are missing (None or False)."""
    if isinstance(answer, OneSided):
        answer = answer.error
    if isinstance(answer, HoldfastError):
        return [wire.encode(Kind.REFUSED, body=wire.error_body(answer))]
    if isinstance(answer, Agreement):
        return [answer.to_frame(0)]
    return [wire.encode(Kind.GO)] if answer else []
