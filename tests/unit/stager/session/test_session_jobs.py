"""Seeded random jobs through the stager's session; its invariants are checked after every event."""

from __future__ import annotations

import random

import pytest

from holdfast.config import IN_FLIGHT_MAX
from holdfast.image.entries import Entry
from holdfast.image.layout import Layout
from holdfast.telemetry.causes import DeclineCause
from holdfast.wire.frames import Kind
from stager.session.checkpoint import Phase
from stager.session.session import Session
from stager.session.session_messages import (
    Abort,
    Action,
    Began,
    BeginReceiving,
    CancelReceive,
    Decline,
    Done,
    Durable,
    Event,
    FillSlot,
    FlusherLost,
    FlusherReplaced,
    FreeSlot,
    GrantCredit,
    MarkFull,
    MarkStaged,
    NewLayout,
    Offer,
    RankBack,
    RankLost,
    RankSilent,
    Received,
    Returned,
    SendMessage,
    Sent,
    SlotsFreed,
    Tick,
)
from tests.support.seeds import each_seed
from tests.unit.stager.session.sessions import CHUNK, is_empty, phases_of, slots_of


class Job:
    """A whole job by chance: ranks that offer, decline, stall, fall silent and die; a flusher that frees parts only in
    the order in which CRCs become known (the worst one: a chunk can be written when all chunks below it are in), and
    that is killed and comes back, its last words lost.
    """

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.ranks = self.draw.randint(1, 4)
        self.slots = self.draw.randint(4, 10)
        self.part_chunks = self.draw.randint(1, 4)
        self.layout = self._layout()
        self.session = Session(
            ranks=self.ranks, free_slots=range(self.slots), offer_seconds_max=60, chunk_seconds_max=120
        )
        self.now = 0.0
        self.alive = set(range(self.ranks))
        self.next_step = dict.fromkeys(range(self.ranks), 0)
        self.owned: dict[int, str] = {}  # slot → who has it, as the actions say
        self.posted: set[tuple[int, int]] = set()  # (rank, slot) with a receive
        self.credits: dict[tuple[int, int, int], set[str]] = {}  # → what has come of it: "sent", "received"
        self.begun: dict[int, bool] = {}  # steps at the flusher → staged?
        self.full: dict[int, dict[int, int]] = {}  # step → chunk → slot
        self.freed_below: dict[int, int] = {}
        self.offered: dict[int, set[int]] = {}
        self.ended: dict[int, Kind] = {}
        self.mortal = self.draw.random() < 0.5
        self.silent: set[int] = set()
        self.flusher_lives = True
        self.freed_unheard: list[int] = []  # slots that a flusher freed when nobody heard it
        self.take(NewLayout(self.layout))

    def _layout(self) -> Layout:
        chunks = self.draw.randint(1, 24)
        nbytes = chunks * CHUNK - self.draw.randrange(CHUNK)
        entries, offset = [], 0
        while offset < nbytes - 50:
            size = self.draw.randrange(0, min(3 * CHUNK, nbytes - offset))
            entries.append(Entry(str(offset), offset, size, self.draw.randrange(-1, self.ranks), ()))
            offset += size + self.draw.randrange(0, 50) + 1
        return Layout(nbytes, CHUNK, self.ranks, tuple(entries))

    # The environment keeps its own books from the actions alone, and compares.

    def take(self, event: Event) -> None:
        for action in self.session.handle(event, self.now):
            self.follow(action)
        free, filling, full = slots_of(self.session)
        assert sorted([*free, *filling, *full]) == list(range(self.slots)), "a slot is lost or shared"
        assert {slot for slot, owner in self.owned.items() if owner == "stager"} == filling
        assert {slot for slot, owner in self.owned.items() if owner == "flusher"} == full

    def follow(self, action: Action) -> None:
        match action:
            case FillSlot(slot, _, _):
                assert slot not in self.owned, "granted a slot that is not free"
                self.owned[slot] = "stager"
            case GrantCredit(rank, step, chunk, slot):
                assert self.owned[slot] == "stager"
                assert rank in self.alive
                assert (rank, slot) not in self.posted, "two receives from one rank into one slot"
                self.posted.add((rank, slot))
                self.credits[rank, step, chunk] = set()
            case CancelReceive(rank, slot):
                self.posted.remove((rank, slot))
            case FreeSlot(slot):
                assert not any(s == slot for _, s in self.posted), "freed under a posted receive"
                assert self.owned.pop(slot) == "stager"
            case MarkFull(slot, step, chunk, sources, _):
                assert not any(s == slot for _, s in self.posted)
                assert tuple(rank for rank, _ in sources) == self.layout.senders(chunk)
                self.owned[slot] = "flusher"
                self.full[step][chunk] = slot
            case BeginReceiving(step, _):
                assert step not in self.begun
                self.begun[step] = False
                self.full[step] = {}
                self.freed_below[step] = 0
            case MarkStaged(step, _, _, _):
                assert self.begun[step] is False
                self.begun[step] = True
            case Abort(step, _):
                del self.begun[step]
            case SendMessage(_, kind, step, _):
                if kind in {Kind.DECLINED, Kind.FAILED, Kind.DURABLE}:
                    assert self.ended.setdefault(step, kind) == kind, "two verdicts on one step"

    # -- what may happen next

    def moves(self) -> list[Event]:
        moves: list[Event] = []
        for (rank, step, chunk), come in self.credits.items():
            if rank not in self.alive or rank in self.silent:
                continue
            nbytes = sum(extent.nbytes for extent in self.layout.pieces(chunk, rank))
            if step in self.ended and not come and self.draw.random() < 0.5:
                moves.append(Returned(rank, step, chunk))
            elif "sent" not in come:
                moves.append(Sent(rank, step, chunk, nbytes, chunk))
            else:
                moves.append(Received(rank, step, chunk))
        if not self.flusher_lives:
            return moves
        moves += [
            Began(step, self.part_chunks)
            for step, p in phases_of(self.session).items()
            if p is Phase.PREPARED
        ]
        moves += self._flusher_moves()
        return moves

    def _flusher_moves(self) -> list[Event]:
        moves: list[Event] = []
        for step, full in self.full.items():
            if step not in self.begun:
                moves += [SlotsFreed((slot,)) for slot in full.values()]
                continue
            start = self.freed_below[step]
            part = range(start, min(start + self.part_chunks, self.layout.chunks))
            if part and all(chunk in full for chunk in part):
                moves.append(SlotsFreed(tuple(full[chunk] for chunk in part)))
            if self.begun[step] and start >= self.layout.chunks:
                moves.append(Durable(step))
        return moves

    def play(self, event: Event) -> None:
        match event:
            case Sent(rank, step, chunk):
                self.credits[rank, step, chunk].add("sent")
            case Received(rank, step, chunk):
                slot = next(
                    s for r, st, c, s in self.session.outstanding() if (r, st, c) == (rank, step, chunk)
                )
                self.posted.remove((rank, slot))
                del self.credits[rank, step, chunk]
            case Returned(rank, step, chunk):
                del self.credits[rank, step, chunk]
            case SlotsFreed(slots):
                self._free(slots)
            case Durable(step):
                del self.begun[step]
        self.take(event)
        if isinstance(event, Received):
            self._say_done(event.rank, event.step)

    def _free(self, slots: tuple[int, ...]) -> None:
        for slot in slots:
            assert self.owned.pop(slot) == "flusher"
        for step, full in self.full.items():
            gone = [chunk for chunk, slot in full.items() if slot in slots]
            for chunk in gone:
                del full[chunk]
            if gone and step in self.begun:
                self.freed_below[step] = max(gone) + 1

    def kill_flusher(self) -> None:
        """Some of what it did last, nobody hears."""
        self.flusher_lives = False
        freed = [move for move in self._flusher_moves() if isinstance(move, SlotsFreed)]
        self.freed_unheard = [slot for move in freed if self.draw.random() < 0.5 for slot in move.slots]
        self.take(FlusherLost("killed"))

    def next_flusher(self) -> None:
        """Another one: what it is told is what the books say."""
        told = {known.step: (set(known.slots), known.staged) for known in self.session.known()}
        assert told == {step: (set(self.full[step].values()), staged) for step, staged in self.begun.items()}
        self._free(tuple(self.freed_unheard))
        freed, self.freed_unheard, self.flusher_lives = tuple(self.freed_unheard), [], True
        self.take(FlusherReplaced(freed))

    def fall_silent(self) -> None:
        rank = self.draw.choice(sorted(self.alive))
        if rank in self.silent:
            self.silent.discard(rank)
            self.take(RankBack(rank))
        else:
            self.silent.add(rank)
            self.take(RankSilent(rank, f"rank {rank}", 31.0))

    def _say_done(self, rank: int, step: int) -> None:
        outstanding = {(r, s) for r, s, _, _ in self.session.outstanding()}
        if (rank, step) not in outstanding:
            self.take(Done(rank, step))

    def offer(self) -> None:
        heard = sorted(self.alive - self.silent)
        if not heard:
            return
        rank = self.draw.choice(heard)
        step = self.next_step[rank]
        self.next_step[rank] += 1
        self.offered.setdefault(step, set()).add(rank)
        chance = self.draw.random()
        if chance < 0.1:
            self.take(Decline(rank, step, DeclineCause.BUSY.because("of the test")))
        elif chance > 0.05:
            self.take(Offer(rank, step, self.layout.digest))
            self._say_done(rank, step)

    def kill(self) -> None:
        rank = self.draw.choice(sorted(self.alive))
        self.alive.remove(rank)
        for credit in [credit for credit in self.credits if credit[0] == rank]:
            del self.credits[credit]
        self.take(RankLost(rank, f"rank {rank} is dead"))

    def run(self) -> None:
        for _ in range(400):
            self.now += self.draw.random()
            chance = self.draw.random()
            moves = self.moves()
            if chance < 0.1:
                self.offer()
            elif chance < 0.12:
                self.now += self.draw.choice([1.0, 30.0, 70.0, 130.0])
                self.take(Tick())
            elif chance < 0.13 and self.mortal and len(self.alive) > 1:
                self.kill()
            elif chance < 0.15:
                self.kill_flusher() if self.flusher_lives else self.next_flusher()
            elif chance < 0.16:
                self.fall_silent()
            elif moves:
                self.play(self.draw.choice(moves))
        self.settle()

    def settle(self) -> None:
        """No rank offers any more: everything must come to an end by itself, then by its deadlines."""
        for rank in sorted(self.silent & self.alive):
            self.take(RankBack(rank))
        self.silent.clear()
        if not self.flusher_lives:
            self.next_flusher()
        for _ in range(10_000):
            moves = self.moves()
            if not moves:
                if is_empty(self.session):
                    break
                self.now += 200
                self.take(Tick())
                continue
            self.play(self.draw.choice(moves))
        assert is_empty(self.session), f"still there: {phases_of(self.session)}"
        assert slots_of(self.session)[0] == set(range(self.slots)), "not every slot came back"
        assert not self.session.outstanding()


@each_seed(150)
def test_a_random_job_keeps_the_rules(seed: int) -> None:
    Job(seed).run()


class Flow(Job):
    """Several checkpoints in a ring that is hardly larger than one part, with ranks that answer, and no deadline.

    With `keeps` the flusher gives the slots of a checkpoint back together, when it is published: another flusher could
    not go on with its upload.
    """

    def __init__(self, seed: int, *, keeps: bool) -> None:
        super().__init__(seed)
        if keeps:
            self.part_chunks = self.layout.chunks
        self.slots = max(self.part_chunks, 2)
        self.session = Session(
            ranks=self.ranks, free_slots=range(self.slots), offer_seconds_max=60, chunk_seconds_max=120
        )
        self.take(NewLayout(self.layout))

    def run(self) -> None:
        steps = self.draw.randint(2, IN_FLIGHT_MAX)
        offers = [(step, rank) for step in range(steps) for rank in range(self.ranks)]
        while (moves := self.moves()) or offers:
            if offers and (not moves or self.draw.random() < 0.2):
                step, rank = offers.pop(0)
                self.take(Offer(rank, step, self.layout.digest))
                self._say_done(rank, step)
            else:
                self.play(self.draw.choice(moves))
        assert self.ended == dict.fromkeys(range(steps), Kind.DURABLE), phases_of(self.session)


@pytest.mark.parametrize("keeps", [False, True], ids=["parts", "whole"])
@each_seed(60)
def test_newer_checkpoints_never_starve_an_older_one(seed: int, keeps: bool) -> None:
    """Progress: no step fails or stands still, whatever the order of events."""
    Flow(1000 + seed, keeps=keeps).run()
