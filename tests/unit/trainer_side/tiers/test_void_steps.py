"""Steps that only some ranks seal: every slot becomes free again without a deadline, in any order of messages."""

from __future__ import annotations

import itertools
import random
from collections import deque

from holdfast.telemetry.causes import DeclineCause
from holdfast.wire import frames as wire
from holdfast.wire.frames import Kind, decode
from trainer_side.tiers.commit_votes import Voter
from trainer_side.tiers.file_slots import FileSlots
from trainer_side.tiers.rank0_votes import Rank0Votes, VoteCount, VoteLimits
from trainer_side.tiers.tier import Order, StepVerdict, reason_body

LIMITS = VoteLimits(agree_seconds_max=1.0, seal_seconds_max=1.0)
BUSY, TORN = DeclineCause.BUSY.because("no slot is free"), DeclineCause.TORN.because("of the test")
STEPS, NOW = 12, 0.0  # time stands still: no deadline frees anything


class _Rank:
    """One rank: it waits for a slot at each step, as `save()` does with `on_full="wait"`."""

    def __init__(self, number: int, slots: int) -> None:
        self.slots = FileSlots(slots)
        self.member = Voter(number, self.judge, None, silence_seconds_max=1.0)
        self.writing: dict[Order, int] = {}
        self.step = 0  # the newest that has a slot here, or was skipped
        self.to_root: deque[bytes] = deque()
        self.from_root: deque[bytes] = deque()
        self.void: set[Order] = set()
        self.sealed: set[int] = set()
        self.complete: set[int] = set()

    def say(self, kind: Kind, order: Order, body: bytes) -> None:
        self.to_root.append(wire.encode(kind, attempt=order[0], step=order[1], arg=0, body=body))

    def begin(self) -> bool:
        order = (1, self.step + 1)
        slot = self.slots.begin(order)
        if slot is None:
            return False
        self.step += 1
        self.writing[order] = slot
        return True

    def skip(self) -> None:
        self.step += 1
        self.say(Kind.SKIPPED, (1, self.step), reason_body(BUSY))

    def end(self, order: Order, *, torn: bool) -> None:
        slot = self.writing.pop(order)
        if torn or order in self.void or not self.slots.is_wanted(slot):
            self.slots.release(slot)
            self.say(Kind.SKIPPED, order, reason_body(TORN))
            return
        self.slots.mark_sealed(slot)
        self.sealed.add(order[1])
        self.member.expect_verdict(0, order, NOW)
        self.say(Kind.SEALED, order, b"layout")

    def judge(self, verdict: StepVerdict) -> None:
        if verdict.complete:
            self.complete.add(verdict.order[1])
            self.slots.complete(verdict.order)
            return
        if verdict.order in self.writing:
            self.void.add(verdict.order)
        self.slots.void(verdict.order)


class _World:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.ranks = [_Rank(number, self.chance.randint(2, 3)) for number in range(self.chance.randint(2, 4))]
        self.rank0 = Rank0Votes(len(self.ranks), LIMITS)
        self.torn_share = self.chance.choice([0.0, 0.3, 0.6])

    def play(self) -> None:
        while True:
            moves = self.moves()
            if moves and self.chance.random() < 0.8:
                self.move(*self.chance.choice(moves))
                continue
            savers = self.savers()
            self.chance.shuffle(savers)
            begun = [self.save(rank) for rank in (savers[:1] if moves else savers)]
            if not moves and not any(begun):
                assert not savers, (
                    f"stalled at step {savers[0].step + 1}: nobody has anything to say, no slot is free"
                )
                return

    def savers(self) -> list[_Rank]:
        slowest = min(rank.step for rank in self.ranks)  # they train together
        return [rank for rank in self.ranks if rank.step < min(STEPS, slowest + 2)]

    def save(self, rank: _Rank) -> bool:
        if self.chance.random() < 0.1:
            rank.skip()
            return True
        return rank.begin()

    def moves(self) -> list[tuple[str, int]]:
        found = []
        for number, rank in enumerate(self.ranks):
            found += [("end", number)] * bool(rank.writing)
            found += [("decide", number)] * bool(rank.to_root)
            found += [("hear", number)] * bool(rank.from_root)
        return found

    def move(self, what: str, number: int) -> None:
        rank = self.ranks[number]
        if what == "end":
            rank.end(self.chance.choice(sorted(rank.writing)), torn=self.chance.random() < self.torn_share)
        elif what == "decide":
            for message in self.rank0.handle(number, decode(rank.to_root.popleft()), NOW):
                for other in self.ranks:
                    other.from_root.append(message)
        else:
            rank.member.handle(decode(rank.from_root.popleft()))


def test_every_slot_is_free_again_whatever_the_order() -> None:
    complete = torn = 0
    for seed in range(400):
        world = _World(seed)
        try:
            world.play()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        by_all = set.intersection(*(rank.sealed for rank in world.ranks))
        by_some = set.union(*(rank.sealed for rank in world.ranks))
        for rank in world.ranks:
            assert rank.step == STEPS, f"seed {seed}"
            assert not rank.member.undecided, f"seed {seed}: a sealed slice has no verdict"
            assert rank.complete == world.ranks[0].complete <= by_all, f"seed {seed}"
            assert rank.slots.begin((1, STEPS + 1)) is not None, f"seed {seed}: no slot is free"
        assert not world.rank0._votes.remembered, f"seed {seed}: all ranks have spoken of every step"
        complete, torn = complete + len(world.ranks[0].complete), torn + len(by_some - by_all)
    assert complete > 1000, "few steps are complete, so few slots are protected"
    assert torn > 500, "only steps that some ranks seal and others do not show anything"


def test_a_rank_that_seals_a_void_step_hears_so_in_every_order_of_three_ranks() -> None:
    for words in itertools.permutations([(0, "sealed"), (1, "skipped"), (2, "sealed")]):
        votes = VoteCount(3, seconds_max=1.0)
        waits: set[int] = set()
        for rank, word in words:
            if word == "sealed":
                waits.add(rank)
                verdicts = votes.count_sealed(rank, 0, (1, 7), "a", NOW)
            else:
                verdicts = votes.count_skipped(rank, 0, (1, 7), TORN)
            assert not any(verdict.complete for verdict in verdicts)
            if verdicts:
                waits.clear()
        assert not waits, f"{words}: ranks {waits} wait for a verdict"
        assert (votes.undecided, votes.remembered) == (0, 0)


def test_a_seal_that_is_late_or_of_another_layout_leaves_the_step_void() -> None:
    votes = VoteCount(2, seconds_max=1.0)
    votes.count_sealed(0, 0, (1, 7), "a", NOW)
    assert votes.overdue(NOW + 2.0)
    (verdict,) = votes.count_sealed(1, 0, (1, 7), "a", NOW + 2.0)
    assert (verdict.complete, verdict.why.text) == (False, "rank 1 has not sealed it within 1 s")
    votes.count_sealed(0, 0, (1, 8), "a", NOW)
    assert votes.count_sealed(1, 0, (1, 8), "b", NOW)
    assert not votes.remembered


def test_a_lost_rank_is_not_waited_for() -> None:
    votes = VoteCount(2, seconds_max=1.0)
    votes.count_skipped(0, 0, (1, 7), TORN)
    assert votes.remembered == 1
    assert not votes.lost(1, "is dead"), "all know that it is void"
    assert not votes.remembered
    assert votes.count_sealed(0, 0, (1, 8), "a", NOW)
    assert not votes.remembered


def test_only_so_many_void_steps_are_remembered() -> None:
    votes = VoteCount(2, seconds_max=1.0, open_max=8)
    for step in range(100):
        votes.count_skipped(0, 0, (1, step), BUSY)
    assert votes.remembered == 8
    assert [bool(votes.count_sealed(1, 0, (1, step), "a", NOW)) for step in (91, 92, 99)] == [
        False,
        True,
        True,
    ]
