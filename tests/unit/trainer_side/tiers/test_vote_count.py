"""Rank 0's decisions on votes; one step that every rank holds always exists, in any order of messages."""

from __future__ import annotations

import random
from collections import deque

from holdfast.errors import StateError
from holdfast.telemetry.causes import DeclineCause, Reason
from tests.support.seeds import each_seed
from trainer_side.tiers.file_slots import FileSlots
from trainer_side.tiers.rank0_votes import VoteCount
from trainer_side.tiers.tier import Order, StepVerdict

RANKS = 3


def _of(verdicts: list[StepVerdict]) -> list[tuple[int, bool]]:
    return [(verdict.order[1], verdict.complete) for verdict in verdicts]


def test_a_step_is_complete_when_the_last_rank_has_sealed_it() -> None:
    votes = VoteCount(RANKS, seconds_max=10.0)
    assert not votes.count_sealed(1, 0, (1, 7), "a", 0.0)
    assert not votes.count_sealed(1, 0, (1, 7), "a", 0.0), "said twice is no second rank"
    assert not votes.count_sealed(0, 0, (1, 7), "a", 1.0)
    assert _of(votes.count_sealed(2, 0, (1, 7), "a", 2.0)) == [(7, True)]
    assert not votes.undecided


def test_each_tier_is_decided_by_itself() -> None:
    votes = VoteCount(2, seconds_max=10.0)
    assert not votes.count_sealed(0, 0, (1, 7), "a", 0.0)
    assert not votes.count_sealed(1, 1, (1, 7), "a", 0.0)
    (verdict,) = votes.count_sealed(1, 0, (1, 7), "a", 0.0)
    assert verdict == StepVerdict(0, (1, 7), complete=True)


def test_void_if_a_rank_skips_it_or_is_late_or_has_another_layout() -> None:
    votes = VoteCount(RANKS, seconds_max=10.0)
    votes.count_sealed(0, 0, (1, 7), "a", 0.0)
    (verdict,) = votes.count_skipped(2, 0, (1, 7), DeclineCause.BUSY.because("no slot"))
    assert verdict == StepVerdict(0, (1, 7), complete=False, why=Reason("busy", "rank 2: busy: no slot"))
    votes.count_sealed(0, 0, (1, 8), "a", 0.0)
    votes.count_sealed(2, 0, (1, 8), "a", 9.0)
    assert not votes.overdue(10.0)
    (verdict,) = votes.overdue(10.1)
    assert (verdict.order, verdict.complete) == ((1, 8), False)
    assert "rank 1 has not sealed it within 10 s" in verdict.why.text
    assert verdict.why.cause == DeclineCause.LATE
    votes.count_sealed(0, 0, (1, 9), "a", 0.0)
    (verdict,) = votes.count_sealed(1, 0, (1, 9), "b", 0.0)
    assert (verdict.order, verdict.complete) == ((1, 9), False)
    assert "rank 1 has another layout" in verdict.why.text
    assert verdict.why.cause == "the ranks' states differ"
    assert not votes.undecided


def test_a_complete_step_ends_what_is_older_and_undecided() -> None:
    votes = VoteCount(2, seconds_max=10.0)
    votes.count_sealed(0, 0, (1, 5), "a", 0.0)
    votes.count_sealed(0, 0, (1, 7), "a", 0.0)
    assert _of(votes.count_sealed(1, 0, (1, 7), "a", 0.0)) == [(7, True), (5, False)]
    assert _of(votes.count_sealed(1, 0, (1, 5), "a", 0.0)) == [(5, False)], "who is late hears of it, too"
    assert not votes.undecided


def test_a_dead_rank_makes_void_what_it_has_not_sealed() -> None:
    votes = VoteCount(2, seconds_max=10.0)
    votes.count_sealed(0, 0, (1, 5), "a", 0.0)
    votes.count_sealed(1, 0, (1, 4), "a", 0.0)
    assert _of(votes.lost(1, "is dead")) == [(5, False)]
    (verdict,) = votes.count_sealed(0, 0, (1, 6), "a", 0.0)
    assert (verdict.complete, verdict.why) == (False, Reason("lost", "rank 1 is dead"))
    assert _of(votes.count_sealed(0, 0, (1, 4), "a", 0.0)) == [(4, True)], (
        "what it had sealed before is there"
    )


def test_a_step_that_is_refused_is_void_in_every_tier_though_all_seal_it() -> None:
    votes = VoteCount(2, seconds_max=10.0)
    votes.count_sealed(0, 0, (1, 7), "a", 0.0)
    differ = Reason.from_error(StateError("replicas differ"))
    assert votes.refuse((1, 7), differ) == [StepVerdict(0, (1, 7), complete=False, why=differ)]
    assert _of(votes.count_sealed(1, 0, (1, 7), "a", 0.0)) == [(7, False)]
    assert not votes.remembered
    for rank in range(2):
        assert _of(votes.count_sealed(rank, 1, (1, 7), "a", 0.0)) == [(7, False)], (
            "a tier that had heard nothing of it"
        )
    votes.count_sealed(0, 0, (1, 8), "a", 0.0)
    assert _of(votes.count_sealed(1, 0, (1, 8), "a", 0.0)) == [(8, True)]


def test_the_vote_counts_memory_is_bounded() -> None:
    votes = VoteCount(2, seconds_max=1e9, open_max=8)
    voided = [
        v.order[1] for step in range(1000) for v in votes.count_sealed(0, step % 2, (1, step), "a", 0.0)
    ]
    assert votes.undecided == 16
    assert voided == list(range(984))


class _World:
    """Ranks with slots, and rank 0's votes; pending messages are delivered in random order."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.ranks, self.count = self.chance.randint(1, 4), self.chance.randint(2, 4)
        self.slots = [FileSlots(self.count) for _ in range(self.ranks)]
        self.votes = VoteCount(self.ranks, seconds_max=50.0, open_max=self.chance.choice([2, 64]))
        self.holds: list[dict[int, Order]] = [{} for _ in range(self.ranks)]  # sealed steps, by slot
        self.writing: list[dict[int, Order]] = [{} for _ in range(self.ranks)]
        self.to_root: list[tuple[int, Order, bool]] = []
        self.to_ranks: list[deque[StepVerdict]] = [deque() for _ in range(self.ranks)]
        self.step = [0] * self.ranks
        self.now = 0.0
        self.completed = 0

    def play(self, turns: int) -> None:
        for _ in range(turns):
            self.now += self.chance.choice([0.0, 0.1, 0.1, 0.3])
            rank = self.chance.randrange(self.ranks)
            self.chance.choice(
                [self.begin, self.begin, self.seal, self.seal, self.decide, self.decide, self.hear]
            )(rank)
            self.check()

    def begin(self, rank: int) -> None:
        if self.step[rank] > min(self.step) + 2:
            return  # ranks train in step
        self.step[rank] += 1
        order = (1, self.step[rank])
        slot = None if self.chance.random() < 0.03 else self.slots[rank].begin(order)
        if slot is None:
            self.to_root.append((rank, order, False))
            return
        self.holds[rank].pop(slot, None)
        self.writing[rank][slot] = order

    def seal(self, rank: int) -> None:
        if not self.writing[rank]:
            return
        slot = self.chance.choice(sorted(self.writing[rank]))
        order = self.writing[rank].pop(slot)
        if self.chance.random() < 0.03 or not self.slots[rank].is_wanted(slot):
            self.slots[rank].release(slot)
            self.to_root.append((rank, order, False))
            return
        self.slots[rank].mark_sealed(slot)
        self.holds[rank][slot] = order
        self.to_root.append((rank, order, True))

    def decide(self, _: int) -> None:
        verdicts = self.votes.overdue(self.now)
        if self.to_root:
            rank, order, sealed = self.to_root.pop(self.chance.randrange(len(self.to_root)))
            if sealed:
                verdicts += self.votes.count_sealed(rank, 0, order, "a", self.now)
            else:
                verdicts += self.votes.count_skipped(rank, 0, order, DeclineCause.BUSY.because("of the test"))
        for verdict in verdicts:
            self.completed += verdict.complete
            for inbox in self.to_ranks:
                inbox.append(verdict)

    def hear(self, rank: int) -> None:
        inbox = self.to_ranks[rank]
        if not inbox:
            return
        inbox.rotate(-self.chance.randrange(len(inbox)))  # even two messages between the same ranks may swap
        verdict = inbox.popleft()
        if verdict.complete:
            self.slots[rank].complete(verdict.order)
        else:
            self.slots[rank].void(verdict.order)

    def check(self) -> None:
        common = set.intersection(*(set(held.values()) for held in self.holds))
        decided = any(verdict.complete for inbox in self.to_ranks for verdict in inbox) or self.completed
        if decided:
            assert common, f"no step is held by all of {self.ranks} ranks any more: {self.holds}"


@each_seed(60)
def test_once_a_step_is_complete_there_is_always_one_that_all_ranks_hold(seed: int) -> None:
    world = _World(seed)
    world.play(1500)
    assert world.completed or world.ranks > 1


def test_the_schedules_do_complete_steps() -> None:
    done = 0
    for seed in range(40):
        world = _World(seed)
        world.play(800)
        done += world.completed
    assert done > 150, "else the test above shows nothing"
