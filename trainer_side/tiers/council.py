"""How the training ranks agree on what lies in their local tiers, without a stager: a thread per rank, rank 0 decides.

    lanes             sealed, skipped ─┐                         ┌─► on_verdict: tier.complete, tier.void
    training thread   agree, concur, … ┼► outbox ═ MPI ═► rank 0 ┼─► answers to `agree`, `concur`
    watch             notice ──────────┘   Tally, Round, Muster, └─► appointments: a step that all ranks save
                                           Chair

No collective operation, no wait without a deadline, no spinning: a thread with nothing to do looks every 10 ms. Where
rank 0 is silent nothing is decided: a slice without a verdict is kept, never called void, because rank 0 may have told
others that it is complete. So local tiers then take nothing new; that is said once.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.errors import HoldfastError, PeerLost, ProtocolError
from holdfast.notices.notice import Notice
from holdfast.wire import frames as wire
from holdfast.wire.agreement import Round, pickle_reserve_bytes
from holdfast.wire.frames import Agreement, Kind, Proposal, decode, peer_error
from trainer_side.notice.appointments import Appointments
from trainer_side.notice.hearing import hear_appointment
from trainer_side.tiers.chair import Chair
from trainer_side.tiers.tally import Muster, Order, StepVerdict, Tally
from trainer_side.tiers.words import Said, Word

_log = logging.getLogger("holdfast.trainer.council")

_PAUSE_SECONDS = 10e-3
_AWAITING_PAUSE_SECONDS = 1e-3
_SLACK_SECONDS = 10.0  # for an answer that itself has a deadline at rank 0
_ROOT = 0


class CouncilPort(Protocol):
    """What it needs of MPI (`trainer_side.ranks.mpi.MpiCouncilPort`). The council's thread only."""

    def send(self, rank: int, message: bytes) -> None:
        """Send to another rank; the order is kept. To a dead one it does nothing."""
        ...

    def poll(self) -> list[tuple[int, bytes]]:
        """All messages that have come, each with its rank. Never waits."""
        ...

    def lost(self) -> frozenset[int]:
        """Ranks that MPI knows to be dead."""
        ...

    def flush(self, seconds_max: float) -> None:
        """Wait until what was sent has left."""
        ...


@dataclass(eq=False)
class _Question:
    """An open `agree` or `concur`. `answer`: None says that all are ready."""

    answered: threading.Event = field(default_factory=threading.Event)
    answer: Agreement | HoldfastError | None = None


class Council:
    """See the module. Any thread, unless a method says otherwise.

    Args:
        port: To the other ranks.
        rank: This one, of `ranks`.
        on_verdict: Told every verdict, in the council's thread.
        agree_seconds_max: How long the slowest rank's layout is waited for.
        seal_seconds_max: How long the slowest rank's slice is waited for.
        on_turn: Called in the council's thread again and again, also when nothing is decided any more.
        appointments: In a job without a stager: at which step this rank acts on a notice. `chair`: who names that step;
            rank 0 only.
        clock: Seconds that only go forward.

    Attributes:
        problem: Why nothing is decided any more; None while all is well.
        new_pickle_reserve_bytes: Room that rank 0's pickle was given after it had outgrown its reserve; 0 before.
    """

    def __init__(
        self,
        port: CouncilPort,
        *,
        rank: int,
        ranks: int,
        on_verdict: Callable[[StepVerdict], None],
        agree_seconds_max: float,
        seal_seconds_max: float,
        on_turn: Callable[[], None] = lambda: None,
        appointments: Appointments | None = None,
        chair: Chair | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._port, self._rank, self._ranks, self._clock = port, rank, ranks, clock
        self._on_verdict, self._on_turn = on_verdict, on_turn
        self._appointments, self._chair = appointments, chair
        self._agree_seconds_max, self._seal_seconds_max = agree_seconds_max, seal_seconds_max
        self.problem: HoldfastError | None = None
        self.new_pickle_reserve_bytes = 0
        self._outbox: deque[Word] = deque()
        self._wake = threading.Event()
        self._undecided: dict[tuple[int, Order], float] = {}  # what this rank has sealed
        self._question: _Question | None = None
        self._tally = Tally(ranks, seconds_max=seal_seconds_max)  # of rank 0
        self._round = Round(ranks, agree_seconds_max, who="rank 0")
        self._muster = Muster(ranks, agree_seconds_max)
        self._lost: frozenset[int] = frozenset()
        self._gone: set[int] = set()  # who has said BYE
        self._said_bye = False
        self._leaving: float | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-council", daemon=True)
        self._thread.start()

    def sealed(self, tier: int, order: Order, layout: str) -> None:
        """This rank has sealed its slice in this tier; once for each slice."""
        self._undecided[tier, order] = self._clock()
        self._say(Word(Said.SEALED, tier, *order, text=layout))

    def skipped(self, tier: int, order: Order, why: str) -> None:
        """This rank will never seal it."""
        self._say(Word(Said.SKIPPED, tier, *order, text=why))

    def agree(self, proposal: Proposal) -> Agreement:
        """Compare this rank's tensors with those of the others. Collective; waits for the slowest rank.

        Raises:
            StateError: The ranks hold different tensors: which rank, which tensor, expected, got.
            PeerLost: A rank did not answer in time.
        """
        answer = self._ask(
            Word(Said.PROPOSE, payload=proposal.to_frame(0)), "compare the layouts of all ranks"
        )
        assert answer is not None
        return answer

    def concur(self, error: HoldfastError | None) -> None:
        """Say that this rank has prepared for the first layout, or why not. Collective; waits for the slowest rank.

        Raises:
            HoldfastError: `error`, or that of another rank, which it names.
            PeerLost: A rank did not answer in time.
        """
        ready = Word(Said.READY) if error is None else Word(Said.READY, text=str(error), code=error.code)
        try:
            self._ask(ready, "hear whether all ranks are ready")
        except HoldfastError as refused:
            raise error or refused from None
        assert error is None

    def _ask(self, word: Word, what: str) -> Agreement | None:
        if self.problem is not None:
            raise self.problem
        question = self._question = _Question()
        self._say(word)
        limit = self._agree_seconds_max + _SLACK_SECONDS
        if not question.answered.wait(limit):
            raise PeerLost(f"rank {self._rank} waited {limit:g} s for rank 0 to {what}")
        if isinstance(question.answer, HoldfastError):
            raise question.answer
        return question.answer

    @property
    def undecided(self) -> int:
        """How many slices that this rank has sealed have no verdict yet."""
        return len(self._undecided)

    def make_room(self, needed_bytes: int) -> None:
        """Rank 0 only: its pickle has outgrown its reserve. All ranks hear how much it gets."""
        assert self._rank == _ROOT
        self._say(Word(Said.ROOM, nbytes=pickle_reserve_bytes(needed_bytes)))

    def notice(self, notice: Notice) -> None:
        """Tell rank 0 that this rank's machine will be taken away, so that all ranks save one step."""
        if self.problem is not None:
            _log.error(
                "rank %d: %s; the ranks no longer agree on anything, so no extra checkpoint is taken",
                self._rank,
                notice.sentence(),
            )
            return
        who = f"rank {self._rank} on host {platform.node()} (process {os.getpid()})"
        message = wire.encode(Kind.NOTICE, body=wire.to_json(notice.to_json()))
        self._say(Word(Said.NOTICE, text=who, payload=message))

    def close(self, seconds_max: float) -> None:
        """Wait for the verdicts that are open, and for the other ranks, and end the thread. Safe to call twice."""
        if self._leaving is None:
            self._leaving = self._clock() + seconds_max
        self._wake.set()
        self._thread.join(seconds_max + _SLACK_SECONDS)

    def _say(self, word: Word) -> None:
        self._outbox.append(word)
        self._wake.set()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._may_leave():
            try:
                self._on_turn()
                busy = self._turn()
            except Exception as error:  # noqa: BLE001 - the tiers' threads go on; what is wrong is said
                self._give_up(
                    error
                    if isinstance(error, HoldfastError)
                    else PeerLost(f"a bug in the council: {error!r}")
                )
                busy = False
            if not busy:
                awaiting = self._question is not None or self._leaving is not None
                self._wake.wait(_AWAITING_PAUSE_SECONDS if awaiting else _PAUSE_SECONDS)
                self._wake.clear()
        if self._appointments is not None:
            self._appointments.end()
        if self.problem is None:
            self._port.flush(_SLACK_SECONDS)

    def _turn(self) -> bool:
        if self.problem is not None:
            self._outbox.clear()
            return False
        busy = False
        while self._outbox:
            busy = True
            self._send(self._outbox.popleft())
        for rank, message in self._port.poll():
            busy = True
            self._hear(rank, Word.from_bytes(message, rank=rank))
        self._look_at_the_dead()
        now = self._clock()
        if self._rank == _ROOT:
            self._decide(self._tally.overdue(now))
            for error in (self._round.overdue(now), self._muster.overdue(now)):
                if error is not None:
                    self._tell_all(_refusal(error))
            if self._chair is not None:
                self._summon(self._chair.tick())
        elif (
            self._undecided
            and now - min(self._undecided.values()) > 2 * self._seal_seconds_max + _SLACK_SECONDS
        ):
            raise PeerLost(
                f"rank {self._rank} has heard nothing from rank 0 of a slice that it has sealed "
                f"{now - min(self._undecided.values()):.0f} s ago"
            )
        return busy

    def _send(self, word: Word) -> None:
        """A word of this rank's own."""
        if word.said is Said.ROOM:
            self._tell_all(word)
        elif self._rank == _ROOT:
            self._hear(_ROOT, word)
        else:
            self._port.send(_ROOT, word.to_bytes())

    def _tell_all(self, word: Word) -> None:
        message = word.to_bytes()
        for rank in range(self._ranks):
            if rank != self._rank and rank not in self._lost:
                self._port.send(rank, message)
        self._hear(self._rank, word)

    def _decide(self, verdicts: list[StepVerdict]) -> None:
        for verdict in verdicts:
            said = Said.COMPLETE if verdict.complete else Said.VOID
            self._tell_all(Word(said, verdict.tier, *verdict.order, text=verdict.why))
            if self._chair is not None:
                self._summon(self._chair.judged(verdict))

    def _summon(self, messages: list[bytes]) -> None:
        """What the chair has to say of a step, to all."""
        for message in messages:
            self._tell_all(Word(Said.SAVE_AT, payload=message))

    def _hear(self, rank: int, word: Word) -> None:
        match word.said:
            case Said.COMPLETE | Said.VOID:
                self._on_verdict(StepVerdict(word.tier, word.order, word.said is Said.COMPLETE, word.text))
                self._undecided.pop((word.tier, word.order), None)
            case Said.AGREED:
                self._answer(Agreement.from_frame(decode(word.payload)))
            case Said.GO:
                self._answer(None)
            case Said.REFUSED:
                self._answer(peer_error(word.code, word.text))
            case Said.ROOM:
                self.new_pickle_reserve_bytes = max(self.new_pickle_reserve_bytes, word.nbytes)
            case Said.SAVE_AT:
                self._hear_appointment(word.payload)
            case _:
                self._hear_as_root(rank, word)

    def _hear_appointment(self, message: bytes) -> None:
        if self._appointments is None:
            return
        try:
            answer = hear_appointment(decode(message), self._appointments)
        except ProtocolError as error:
            _log.error("rank %d: a step to save after a notice is left out: %s", self._rank, error)
            self._appointments.end()
            return
        if answer is not None:
            self._say(Word(Said.AT, payload=answer))

    def _hear_as_root(self, rank: int, word: Word) -> None:
        if self._chair is not None:
            self._chair_hears(self._chair, rank, word)
        match word.said:
            case Said.SEALED:
                self._decide(self._tally.sealed(rank, word.tier, word.order, word.text, self._clock()))
            case Said.SKIPPED:
                self._decide(self._tally.skipped(rank, word.tier, word.order, word.text))
            case Said.PROPOSE:
                answer = self._round.propose(rank, Proposal.from_frame(decode(word.payload)), self._clock())
                if isinstance(answer, Agreement):
                    self._tell_all(Word(Said.AGREED, payload=answer.to_frame(0)))
                elif answer is not None:
                    self._tell_all(_refusal(answer))
            case Said.READY:
                said = self._muster.ready(rank, word.code, word.text, self._clock())
                if isinstance(said, HoldfastError):
                    self._tell_all(_refusal(said))
                elif said:
                    self._tell_all(Word(Said.GO))
            case Said.BYE:
                self._gone.add(rank)
                self._decide(self._tally.lost(rank, "has ended"))

    def _chair_hears(self, chair: Chair, rank: int, word: Word) -> None:
        """Before the tally does: what it decides of a step is heard after what the ranks have said of it."""
        match word.said:
            case Said.SEALED | Said.SKIPPED:
                chair.told(word.tier, word.order)
            case Said.NOTICE | Said.AT:
                self._summon(chair.hear(rank, word.text, word.payload))
            case Said.BYE:
                self._summon(chair.left(rank, "has ended"))

    def _answer(self, answer: Agreement | HoldfastError | None) -> None:
        question, self._question = self._question, None
        if question is not None:
            question.answer = answer
            question.answered.set()

    def _look_at_the_dead(self) -> None:
        lost = self._port.lost()
        if lost == self._lost:
            return
        new, self._lost = lost - self._lost, lost
        self._gone |= new
        if self._rank != _ROOT:
            if _ROOT in new and self._leaving is None:
                raise PeerLost("rank 0 of the training ranks is dead")
            return
        for rank in sorted(new):
            if self._chair is not None:
                self._summon(self._chair.left(rank, "is dead"))
            self._decide(self._tally.lost(rank, "is dead"))
            for error in (
                self._round.lost(f"rank {rank} is dead"),
                self._muster.lost(f"rank {rank} is dead"),
            ):
                if error is not None:
                    self._tell_all(_refusal(error))

    def _give_up(self, error: HoldfastError) -> None:
        if self.problem is not None:
            return
        _log.error(
            "rank %d: local tiers TAKE NOTHING NEW in this job, what is complete in them stays: %s",
            self._rank,
            error,
        )
        self.problem = error  # behind the log: who sees the one has been told of the other
        self._answer(error)
        if self._appointments is not None:
            self._appointments.end()

    def _may_leave(self) -> bool:
        """Whether nobody waits for this rank any more, nor this rank for anybody."""
        if self._leaving is None:
            return False
        if self.problem is not None or self._clock() > self._leaving:
            return True
        if not self._said_bye:
            self._said_bye = True
            self._say(Word(Said.BYE))  # behind all that was sealed
        if self._outbox or self._undecided:
            return False
        return self._rank != _ROOT or len(self._gone | self._lost) == self._ranks


def _refusal(error: HoldfastError) -> Word:
    return Word(Said.REFUSED, code=error.code, text=str(error))
