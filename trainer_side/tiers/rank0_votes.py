"""Rank 0's part in the commit votes: a pure core. Frames of the ranks go in, messages to all ranks come out.

SEALED, SKIPPED ─► VoteCount    ─► COMPLETE, VOID
DONE            ─► ReplicaComparison ─► VOID, where replicas differ and such steps are refused
PROPOSE, FITS   ─► LayoutRound        ─► RESERVED, or REFUSED
READY           ─► StartBarrier ─► GO, or REFUSED
NOTICE, AT      ─► Rank0PreemptionCoordinator ─► SAVE_AT
ROOM            ─────────────────► ROOM
DOUBT           ─────────────────► DOUBTED

Rank 0 decides for each tier separately, since memory and disks fail separately, and each step once. Ranks overwrite
older steps only after COMPLETE, and therefore never the last step that all ranks hold.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.errors import HoldfastError, PeerLost, ProtocolError, StateError
from holdfast.image.layout import Layout
from holdfast.image.replicas import FIELD, ReplicaComparer
from holdfast.telemetry.causes import DeclineCause, Reason
from holdfast.telemetry.events import EventLog
from holdfast.wire import frames as wire
from holdfast.wire.doubt import Doubt
from holdfast.wire.frames import Frame, Kind, peer_error
from holdfast.wire.layout_round import LayoutRound, OneSidedRound
from holdfast.wire.state_messages import Agreement
from trainer_side.tiers.rank0_preemption import Rank0PreemptionCoordinator
from trainer_side.tiers.tier import Order, StepVerdict, read_reason

ROOT = 0

_log = logging.getLogger("holdfast.trainer.council")
_OUTDATED = Reason(DeclineCause.SUPERSEDED, "a newer step is complete")
_LAYOUT = "layout"
_LAYOUTS_KEPT = 4
_STEPS_MAX = 16  # steps without the fingerprints of all ranks; more than are ever in flight


class VoteLimits(NamedTuple):
    """How long to wait for the slowest rank, in seconds: for its layout (`agree`), and for its slice (`seal`)."""

    agree_seconds_max: float
    seal_seconds_max: float


class Rank0Votes:
    """Takes the ranks' messages, rank 0's included, and decides. Not thread-safe.

    Each method returns the messages to all ranks, rank 0 included, in order. A job with a stager passes no
    `preemption`.
    """

    def __init__(
        self,
        ranks: int,
        limits: VoteLimits,
        preemption: Rank0PreemptionCoordinator | None = None,
        watch: ReplicaComparison | None = None,
    ) -> None:
        self._ranks, self._preemption, self._watch = ranks, preemption, watch
        self._votes = VoteCount(ranks, seconds_max=limits.seal_seconds_max)
        self._round = LayoutRound(ranks, limits.agree_seconds_max, leader="rank 0")
        self._start = StartBarrier(ranks, limits.agree_seconds_max)
        self._left: set[int] = set()

    @property
    def all_left(self) -> bool:
        """Whether every rank, rank 0 included, has said BYE or is dead."""
        return len(self._left) == self._ranks

    def handle(self, rank: int, frame: Frame, now: float) -> list[bytes]:
        """Handle a message of one rank. ProtocolError: the message is malformed, or not for rank 0."""
        order, tier, kind = (frame.attempt, frame.step), frame.arg, frame.kind
        if self._preemption is not None and kind in (Kind.SEALED, Kind.SKIPPED):
            # Before the votes are counted, so that the coordinator gets the ranks' votes before the verdict.
            self._preemption.on_vote(tier, order, given_up=kind is Kind.SKIPPED and rank == ROOT)
        match kind:
            case Kind.SEALED:
                layout = wire.decode_text(frame)
                return self._verdicts(self._votes.count_sealed(rank, tier, order, layout, now))
            case Kind.SKIPPED:
                return self._verdicts(self._votes.count_skipped(rank, tier, order, read_reason(frame)))
            case Kind.DONE if self._watch is not None:
                error = self._watch.handle(rank, frame)
                return self._verdicts(self._votes.refuse(order, Reason.from_error(error))) if error else []
            case Kind.PROPOSE:
                return _encode_answer(self._round.propose(rank, self._round.read(frame), now))
            case Kind.FITS:
                return _encode_answer(self._round.record_fits(rank, frame.step))
            case Kind.READY:
                code, message = _read_refusal(frame)
                return _encode_answer(self._start.mark_ready(rank, code, message, now))
            case Kind.ROOM if rank == ROOT:
                return [wire.encode(Kind.ROOM, arg=frame.arg)]
            case Kind.DOUBT:
                return [_doubted_message(rank, frame)]
            case Kind.NOTICE | Kind.AT if self._preemption is not None:
                return self._preemption.handle(rank, frame)
            case Kind.BYE:
                return self._rank_left(rank, "has ended", has_exited=True)
            case _:
                raise ProtocolError(f"rank {rank} sent {frame.kind.name} to rank 0, which it must not")

    def rank_died(self, rank: int) -> list[bytes]:
        return self._rank_left(rank, "is dead")

    def tick(self, now: float) -> list[bytes]:
        if late := self._round.late_warning(now):
            _log.warning("%s", late)
        messages = self._verdicts(self._votes.overdue(now))
        for error in (self._round.expire(now), self._start.overdue(now)):
            messages += _encode_answer(error)
        return messages + (self._preemption.tick() if self._preemption is not None else [])

    def _rank_left(self, rank: int, why: str, *, has_exited: bool = False) -> list[bytes]:
        self._left.add(rank)
        messages = self._preemption.rank_left(rank, why) if self._preemption is not None else []
        messages += self._verdicts(self._votes.lost(rank, why))
        reason = f"rank {rank} {why}"
        for error in (self._round.record_lost(rank, reason, has_exited=has_exited), self._start.lost(reason)):
            messages += _encode_answer(error)
        return messages

    def _verdicts(self, verdicts: list[StepVerdict]) -> list[bytes]:
        messages: list[bytes] = []
        for verdict in verdicts:
            messages.append(verdict.to_frame())
            if self._preemption is not None:
                messages += self._preemption.on_verdict(verdict)
        return messages


@dataclass
class _Ballot:
    since: float
    layout: str = ""
    sealed: set[int] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)
    void: Reason | None = None  # why the step is void; None while undecided


class VoteCount:
    """Counts the sealed slices. Not thread-safe.

    A void step is remembered until every rank has sealed or skipped it. A rank that seals it last would otherwise open
    a new ballot, in which the others do not vote again, and its slot would stay occupied until the deadline.

    The last rank may be `seconds_max` later than the first. `open_max` limits the undecided steps of one tier, and the
    remembered void ones: beyond it, the oldest undecided step becomes void, and the oldest void one is forgotten.
    """

    def __init__(self, ranks: int, *, seconds_max: float, open_max: int = 64) -> None:
        self._ranks, self._seconds_max, self._open_max = ranks, seconds_max, open_max
        self._ballots: dict[tuple[int, Order], _Ballot] = {}
        self._newest: dict[int, Order] = {}
        self._lost: dict[int, str] = {}
        self._refused: dict[Order, Reason] = {}

    @property
    def undecided(self) -> int:
        return sum(ballot.void is None for ballot in self._ballots.values())

    @property
    def remembered(self) -> int:
        """Number of steps that are undecided, or void and not yet voted on by every rank, over all tiers."""
        return len(self._ballots)

    def count_sealed(self, rank: int, tier: int, order: Order, layout: str, now: float) -> list[StepVerdict]:
        """Count a rank's sealed slice, of the layout with this digest. Called once per rank and slice."""
        if order <= self._newest.get(tier, (0, 0)):
            return [StepVerdict(tier, order, complete=False, why=_OUTDATED)]
        ballot = self._ballots.setdefault((tier, order), _Ballot(now, layout))
        ballot.sealed.add(rank)
        if ballot.void:
            return [self._void(tier, order, ballot.void)]
        if order in self._refused:
            return [self._void(tier, order, self._refused[order])]
        if ballot.layout != layout:
            differs = StateError(f"rank {rank} has another layout than the ranks before it")
            return [self._void(tier, order, Reason.from_error(differs))]
        if len(ballot.sealed) == self._ranks:
            return self._complete(tier, order)
        if self._lost.keys() - ballot.sealed:
            return [self._void(tier, order, self._lost_reason(ballot))]
        undecided = self._orders(tier, void=False)
        if len(undecided) > self._open_max:
            crowded = Reason(DeclineCause.LATE, f"more than {self._open_max} steps are undecided")
            return [self._void(tier, min(undecided), crowded)]
        return []

    def refuse(self, order: Order, why: Reason) -> list[StepVerdict]:
        """Let no tier keep this step, even if some slices are sealed. Called before every rank has sealed its slice."""
        self._refused[order] = why
        if len(self._refused) > self._open_max:
            del self._refused[min(self._refused)]
        tiers = [tier for (tier, one), ballot in self._ballots.items() if one == order and not ballot.void]
        return [self._void(tier, order, why) for tier in tiers]

    def count_skipped(self, rank: int, tier: int, order: Order, why: Reason) -> list[StepVerdict]:
        """Note that a rank will never seal its slice. Called once per rank and slice that is not sealed."""
        if order <= self._newest.get(tier, (0, 0)):
            return [StepVerdict(tier, order, complete=False, why=_OUTDATED)]
        ballot = self._ballots.setdefault((tier, order), _Ballot(0.0))
        ballot.skipped.add(rank)
        if ballot.void:
            self._forget(tier, order)
            return []  # every rank knows already
        return [self._void(tier, order, why.with_rank(rank))]

    def lost(self, rank: int, why: str) -> list[StepVerdict]:
        """Note that a rank will seal nothing more: every step that it has not sealed by now is void."""
        self._lost[rank] = why
        found = []
        for (tier, order), ballot in list(self._ballots.items()):
            if ballot.void:
                self._forget(tier, order)
            elif rank not in ballot.sealed:
                found.append(self._void(tier, order, self._lost_reason(ballot)))
        return found

    def overdue(self, now: float) -> list[StepVerdict]:
        found = []
        for (tier, order), ballot in list(self._ballots.items()):
            if not ballot.void and now - ballot.since > self._seconds_max:
                missing = [str(rank) for rank in range(self._ranks) if rank not in ballot.sealed]
                why = f"rank {', '.join(missing)} has not sealed it within {self._seconds_max:g} s"
                found.append(self._void(tier, order, Reason(DeclineCause.LATE, why)))
        return found

    def _complete(self, tier: int, order: Order) -> list[StepVerdict]:
        self._newest[tier] = order
        older = [other for other in self._orders(tier, void=False) if other < order]
        for key in [key for key in self._ballots if key[0] == tier and key[1] <= order]:
            del self._ballots[key]
        why = Reason(DeclineCause.SUPERSEDED, f"step {order[1]} is complete, and newer")
        return [
            StepVerdict(tier, order, complete=True),
            *(StepVerdict(tier, other, complete=False, why=why) for other in older),
        ]

    def _void(self, tier: int, order: Order, why: Reason) -> StepVerdict:
        self._ballots[tier, order].void = why
        self._forget(tier, order)
        void = self._orders(tier, void=True)
        if len(void) > self._open_max:
            del self._ballots[tier, min(void)]
        return StepVerdict(tier, order, complete=False, why=why)

    def _forget(self, tier: int, order: Order) -> None:
        """Forget a void step once every rank has voted or is lost."""
        ballot = self._ballots[tier, order]
        if len(ballot.sealed | ballot.skipped | self._lost.keys()) == self._ranks:
            del self._ballots[tier, order]

    def _orders(self, tier: int, *, void: bool) -> list[Order]:
        ballots = self._ballots.items()
        return [one for (at, one), ballot in ballots if at == tier and (ballot.void is not None) == void]

    def _lost_reason(self, ballot: _Ballot) -> Reason:
        missing = sorted(self._lost.keys() - ballot.sealed)
        return Reason(DeclineCause.LOST, "; ".join(f"rank {rank} {self._lost[rank]}" for rank in missing))


class StartBarrier:
    """Counts the ranks that have prepared for the first layout. Not thread-safe."""

    def __init__(self, ranks: int, seconds_max: float) -> None:
        self._ranks, self._seconds_max = ranks, seconds_max
        self._answers: dict[int, HoldfastError | None] = {}
        self._begun_at = 0.0

    def mark_ready(self, rank: int, code: str, text: str, now: float) -> bool | HoldfastError:
        """Note that a rank is ready, or has refused with an error code. Returns False while ranks are missing."""
        if not self._answers:
            self._begun_at = now
        self._answers[rank] = peer_error(code, f"rank {rank}: {text}") if code else None
        if len(self._answers) < self._ranks:
            return False
        said, self._answers = self._answers, {}
        return next((said[other] for other in sorted(said) if said[other] is not None), None) or True

    def overdue(self, now: float) -> HoldfastError | None:
        """Return the error for all ranks if some rank was not ready in time."""
        if not self._answers or now - self._begun_at <= self._seconds_max:
            return None
        missing = [str(rank) for rank in range(self._ranks) if rank not in self._answers]
        self._answers = {}
        return PeerLost(
            f"rank 0 waited {self._seconds_max:g} s for rank {', '.join(missing)} to prepare for the first checkpoint"
        )

    def lost(self, reason: str) -> HoldfastError | None:
        """Return the error for all ranks if a rank is lost while others wait."""
        if not self._answers:
            return None
        self._answers = {}
        return PeerLost(f"the ranks cannot prepare for the first checkpoint: {reason}")


def fingerprints_frame(order: Order, layout_digest: str, text: str) -> bytes:
    """Encode the DONE message with the fingerprints of one rank."""
    attempt, step = order
    body = wire.to_json({FIELD: text, _LAYOUT: layout_digest})
    return wire.encode(Kind.DONE, attempt=attempt, step=step, body=body)


class ReplicaComparison:
    """Compares the replicas of all ranks on rank 0, as the stager would, for steps that no stager takes.

    A rank sends its fingerprints before the first frame of its slice is ready, and so before it seals the slice in any
    tier: every step is compared before it is complete in a tier. With `refuses`, a step whose replicas differ is kept
    nowhere (`on_divergence=refuse`). The votes' thread of rank 0, except `laid_out`.
    """

    def __init__(self, ranks: int, events: EventLog, *, refuses: bool) -> None:
        self._ranks, self._events, self._refuses = ranks, events, refuses
        self._replicas = ReplicaComparer()
        self._guard = threading.Lock()
        self._layouts: dict[str, Layout] = {}
        # Rank → digest of its layout, fingerprints.
        self._fingerprints: dict[Order, dict[int, tuple[str, str]]] = {}

    def laid_out(self, layout: Layout) -> None:
        """Expect slices of this layout. Training thread."""
        with self._guard:
            self._layouts.pop(layout.digest, None)
            self._layouts[layout.digest] = layout
            while len(self._layouts) > _LAYOUTS_KEPT:
                del self._layouts[next(iter(self._layouts))]

    def handle(self, rank: int, frame: Frame) -> StateError | None:
        """Take the fingerprints of one rank; return why no tier may keep the step, None if tiers may."""
        body = wire.json_body(frame, **{FIELD: str, _LAYOUT: str})
        order = (frame.attempt, frame.step)
        said = self._fingerprints.setdefault(order, {})
        said[rank] = body[_LAYOUT], body[FIELD]
        if len(said) == self._ranks:
            for older in [other for other in self._fingerprints if other <= order]:
                del self._fingerprints[older]
            return self._compare(frame.step, said)
        if len(self._fingerprints) > _STEPS_MAX:
            del self._fingerprints[min(self._fingerprints)]
        return None

    def _compare(self, step: int, said: dict[int, tuple[str, str]]) -> StateError | None:
        digests = {digest for digest, _ in said.values()}
        with self._guard:
            layout = self._layouts.get(next(iter(digests)))
        if len(digests) > 1 or layout is None:
            return None  # `VoteCount` calls a step of several layouts void
        fingerprints = {rank: self._replicas.read(layout, text) for rank, (_, text) in said.items()}
        divergence = self._replicas.compare(layout, step, fingerprints)
        if divergence is None:
            return None
        if self._replicas.is_new(divergence):
            _log.error("%s", divergence.message)
            self._events.emit("divergence", divergence.to_json(), step=step)
        return StateError(divergence.message) if self._refuses else None


def _doubted_message(rank: int, frame: Frame) -> bytes:
    """Encode the message to all ranks about a rank's doubt. ProtocolError: malformed, or in another rank's name."""
    doubt = Doubt.from_frame(frame)
    if doubt.rank != rank:
        raise ProtocolError(f"rank {rank} sent DOUBT in the name of rank {doubt.rank}")
    return doubt.to_frame(Kind.DOUBTED, attempt=frame.attempt)


def _read_refusal(frame: Frame) -> tuple[str, str]:
    """Return code and message of a READY that refuses; both are empty if the rank is ready."""
    if not wire.json_body(frame):
        return "", ""
    body = wire.json_body(frame, code=str, message=str)
    return body["code"], body["message"]


def _encode_answer(answer: Agreement | HoldfastError | OneSidedRound | bool | None) -> list[bytes]:
    """Encode the message to all ranks about a round or the start barrier; empty while ranks are missing."""
    if isinstance(answer, OneSidedRound):
        answer = answer.error
    if isinstance(answer, HoldfastError):
        return [wire.encode(Kind.REFUSED, body=wire.error_body(answer))]
    if isinstance(answer, Agreement):
        return [answer.to_frame(0)]
    return [wire.encode(Kind.GO)] if answer else []
