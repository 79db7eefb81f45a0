"""Rank 0 coordinates a save after a notice: real votes and appointments, in any order of messages, steps and seals."""

from __future__ import annotations

import random
import time
from collections import deque
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.errors import PeerLost
from holdfast.notices.messages import Announcement, AnnouncementKind
from holdfast.notices.notice import Notice, NoticeKind
from holdfast.telemetry.causes import DeclineCause
from holdfast.telemetry.events import EventLog
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind
from tests.support.events import read_events
from trainer_side.notice.agreed_steps import AgreedSteps
from trainer_side.tiers.commit_votes import CommitVotes
from trainer_side.tiers.rank0_preemption import Rank0PreemptionCoordinator, farthest
from trainer_side.tiers.rank0_votes import Rank0Votes, VoteLimits
from trainer_side.tiers.tier import Nearness, Order, StepVerdict, Tier

NEAR, FAR = 0, 1
SCHEDULES = 250


def notice(seconds: float | None, kind: NoticeKind = NoticeKind.TERMINATE) -> Notice:
    return Notice(kind, None if seconds is None else time.time() + seconds, "aws", "a test")


# -- the coordinator alone ---------------------------------------------------------------------------------------


class Bench:
    """A coordinator of two ranks, with clock and progress set by the test."""

    def __init__(self, directory: Path, ranks: int = 2) -> None:
        self.ranks, self.now, self.fraction = ranks, 0.0, 0.0
        self.path = directory / "events"
        self.coordinator = Rank0PreemptionCoordinator(
            ranks,
            FAR,
            "kept in the store",
            attempt=3,
            fraction=lambda _order: self.fraction,
            events=EventLog(self.path, role="trainer", rank=0),
            clock=lambda: self.now,
        )

    def tell(
        self, seconds: float | None, rank: int = 1, kind: NoticeKind = NoticeKind.TERMINATE
    ) -> list[Frame]:
        told = {**notice(seconds, kind).to_json(), "who": f"rank {rank} on host spot"}
        return self.frames(self.coordinator.handle(rank, Frame(Kind.NOTICE, body=wire.to_json(told))))

    def answer(self, rank: int, number: int, next_step: int, seconds: object = 0.1) -> list[Frame]:
        body = wire.to_json({"step_seconds": seconds})
        return self.frames(
            self.coordinator.handle(rank, Frame(Kind.AT, step=next_step, arg=number, body=body))
        )

    def appoint(self, frames: list[Frame]) -> Frame:
        """Let all ranks, at step 10, answer until a step is appointed."""
        while (frame := frames[-1]).flags == AnnouncementKind.PROPOSED.value:
            for rank in range(self.ranks):
                frames = self.answer(rank, frame.arg, 10)
        assert frame.flags == AnnouncementKind.APPOINTED.value
        return frame

    def keep(self, step: int, tier: int = FAR) -> None:
        """Let all ranks seal a step in a tier, the last one a second after this rank began it."""
        self.coordinator.record_begun(tier, (3, step), 1000)
        self.now += 1.0
        for _ in range(self.ranks):
            self.coordinator.on_vote(tier, (3, step), given_up=False)
        assert self.coordinator.on_verdict(StepVerdict(tier, (3, step), complete=True)) == []

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in read_events(self.path) if line["event"] == name]

    @staticmethod
    def frames(messages: list[bytes]) -> list[Frame]:
        found = [wire.decode(message) for message in messages]
        assert all((frame.kind, frame.attempt) == (Kind.SAVE_AT, 3) for frame in found)
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_step_is_safe_when_it_is_complete_in_the_farthest_tier(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    step = bench.appoint(bench.tell(60.0)).step
    assert step > 10
    bench.coordinator.record_begun(FAR, (3, step), 1000)
    bench.keep(step, NEAR)
    assert not bench.events("emergency_staged"), "in memory it goes with the machine"
    bench.keep(step)
    (staged,) = bench.events("emergency_staged")
    assert staged["saved_step"] == step
    assert staged["seconds"] == 1.0
    assert staged["seconds_left"] == pytest.approx(58.0, abs=0.5)
    assert (
        f"the checkpoint of step {step}, saved because rank 1 on host spot received a termination notice"
        in caplog.text
    )
    assert "is kept in the store, 58.0 s before the deadline" in caplog.text


def test_the_plan_uses_the_time_of_the_farthest_tier(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.keep(5)
    bench.coordinator.record_begun(NEAR, (3, 6), 1000)
    bench.now += 100.0  # a slow near tier changes nothing
    bench.coordinator.on_verdict(StepVerdict(NEAR, (3, 6), complete=True))
    appointed = wire.json_body(bench.appoint(bench.tell(2.0)))
    assert not appointed["save"]
    (emergency,) = bench.events("emergency")
    assert emergency["choice"] == "skip"
    assert emergency["needed_seconds"] == pytest.approx(1.25 * (1.0 + 0.1) + 1.0)
    assert "step 5 is kept in the store" in caplog.text
    assert wire.json_body(bench.appoint(bench.tell(3.0)))["save"]


@pytest.mark.parametrize(("fraction", "choice"), [(0.05, "finish"), (1.0, "take")])
def test_frames_that_this_rank_has_yet_to_write_are_in_flight(
    bench: Bench, fraction: float, choice: str
) -> None:
    bench.keep(5)
    bench.coordinator.record_begun(FAR, (3, 7), 1000)
    bench.now += 0.1
    bench.fraction = fraction
    bench.appoint(bench.tell(3.0))
    assert [event["choice"] for event in bench.events("emergency")] == [choice]


def test_a_step_that_is_void_is_taken_later_and_a_rank_that_left_ends_it(bench: Bench) -> None:
    first = bench.appoint(bench.tell(60.0)).step
    bench.coordinator.record_begun(FAR, (3, first), 1000)
    bench.coordinator.on_vote(FAR, (3, first), given_up=False)
    busy = DeclineCause.BUSY.because("of the test").with_rank(1)
    void = StepVerdict(FAR, (3, first), complete=False, why=busy)
    again = bench.frames(bench.coordinator.on_verdict(void))
    assert [frame.flags for frame in again] == [AnnouncementKind.PROPOSED.value]
    (called_off,) = bench.frames(bench.coordinator.rank_left(1, "is dead"))
    assert called_off.flags == AnnouncementKind.CALLED_OFF.value
    (failed,) = bench.events("emergency_failed")
    assert failed["reason"] == "no checkpoint can be whole: rank 1 is dead"


def test_a_rank_that_does_not_answer_ends_it_by_name(bench: Bench) -> None:
    (proposed,) = bench.tell(60.0)
    bench.answer(0, proposed.arg, 10)
    bench.now = 10.5
    (called_off,) = bench.frames(bench.coordinator.tick())
    assert called_off.flags == AnnouncementKind.CALLED_OFF.value
    assert "rank 1 did not answer within 10 s" in bench.events("emergency_failed")[0]["reason"]


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Kind.NOTICE),
        Frame(Kind.NOTICE, body=b'{"kind": "dance", "seconds_left": 3, "source": "aws"}'),
        Frame(Kind.NOTICE, body=b'{"kind": "terminate", "seconds_left": "soon", "source": "aws"}'),
        Frame(Kind.AT, arg=1, step=10, body=b'{"step_seconds": -1}'),
        Frame(Kind.AT, arg=1, step=10, body=b'{"step_seconds": NaN}'),
        Frame(Kind.AT, arg=1, step=10, body=b"[]"),
    ],
)
def test_a_senseless_frame_is_left_out_and_the_next_one_is_heard(
    bench: Bench, caplog: pytest.LogCaptureFixture, frame: Frame
) -> None:
    assert bench.coordinator.handle(1, frame) == []
    assert caplog.text.count("ignoring a message of rank 1 about a notice") == 1
    assert not bench.events("notice")
    assert wire.json_body(bench.appoint(bench.tell(60.0)))["save"]


def test_the_farthest_tier_is_what_outlives_most() -> None:
    def of(*kinds: str) -> int:
        tiers = [cast(Tier, type("T", (), {"nearness": Nearness(kind)})()) for kind in kinds]
        return farthest(tiers)

    assert of("memory") == 0
    assert of("memory", "pm", "nvme", "file") == 3
    assert of("file", "memory", "nvme") == 0
    assert of("memory", "nvme", "nvme") == 1


# -- all ranks ---------------------------------------------------------------------------------------------------


class Lines:
    """Simulates MPI for the councils: messages between two ranks arrive in order, when the test delivers them."""

    def __init__(self, ranks: int) -> None:
        self.under_way: dict[tuple[int, int], deque[bytes]] = {
            (one, other): deque() for one in range(ranks) for other in range(ranks)
        }
        self.arrived: list[list[tuple[int, bytes]]] = [[] for _ in range(ranks)]
        self.dead: set[int] = set()

    def port(self, rank: int) -> Any:
        lines = self

        class Port:
            def __init__(self) -> None:
                self.rank, self.ranks = rank, len(lines.arrived)

            def send(self, other: int, message: bytes) -> None:
                if not {rank, other} & lines.dead:
                    lines.under_way[rank, other].append(message)

            def poll(self) -> list[tuple[int, bytes]]:
                found, lines.arrived[rank] = lines.arrived[rank], []
                return found

            def lost_ranks(self) -> frozenset[int]:
                return frozenset(lines.dead - {rank})

            def flush(self, seconds_max: float) -> None:
                """Do nothing: messages are handed over at once."""

        return Port()


class Rank:
    """One rank of a world: trains, saves at appointed steps, seals."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.agreed_steps = AgreedSteps(wait_seconds_max=30, clock=lambda: world.now)
        self.verdicts: list[StepVerdict] = []
        coordinator = None
        if rank == 0:
            coordinator = Rank0PreemptionCoordinator(
                world.count,
                FAR,
                "kept in the store",
                attempt=1,
                fraction=lambda _order: 0.5,
                events=world.log,
                clock=lambda: world.now,
            )
        self.coordinator = coordinator
        limits = VoteLimits(60.0, 60.0)
        self.council = CommitVotes(
            world.lines.port(rank),
            limits,
            on_verdict=self.verdicts.append,
            agreed_steps=self.agreed_steps,
            rank0=Rank0Votes(world.count, limits, coordinator) if rank == 0 else None,
            clock=lambda: world.now,
        )
        self.step = -1
        self.acted: list[tuple[int, bool]] = []
        self.unsealed: list[tuple[int, Order]] = []
        self.sealed: set[tuple[int, Order]] = set()

    @property
    def waits(self) -> bool:
        """Whether training would block in its next `reach`, which the test's only thread must avoid."""
        return self.agreed_steps.promises.waits_at(self.step + 1)

    @property
    def is_due(self) -> bool:
        """Whether this rank has not yet reached a proposed or appointed step."""
        return self.agreed_steps.promises.pending

    def train(self) -> None:
        if self.waits:
            return
        self.step += 1
        due = self.agreed_steps.reach(self.step)
        if due is not None:
            self.acted.append((self.step, due.save))
        if (due is None or not due.save) and (self.step + 1) % self.world.every:
            return
        order = (1, self.step)
        for tier in (NEAR, FAR):
            if self.world.chance.random() < self.world.declines:
                self.council.vote_skipped(tier, order, DeclineCause.BUSY.because("of the test"))
                continue
            if self.coordinator is not None:
                self.coordinator.record_begun(tier, order, 1000)
            self.unsealed.append((tier, order))

    def seal(self) -> None:
        if self.unsealed:
            tier, order = self.unsealed.pop(self.world.chance.randrange(len(self.unsealed)))
            self.sealed.add((tier, order))
            self.council.vote_sealed(tier, order, "layout")


class World:
    """Ranks that train together, a few steps apart, and get notices now and then."""

    def __init__(self, seed: int, path: Path, *, ranks: int | None = None) -> None:
        self.chance = random.Random(seed)
        self.count = ranks or self.chance.randint(1, 4)
        self.every = self.chance.choice([7, 10_000])
        self.declines = self.chance.choice([0.0, 0.0, 0.2])
        self.now = 0.0
        self.lines = Lines(self.count)
        self.path = path
        self.log = EventLog(path, role="trainer", rank=0)
        self.ranks = [Rank(self, rank) for rank in range(self.count)]

    @property
    def living(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.rank not in self.lines.dead]

    def turn(self) -> None:
        rank = self.chance.choice(self.living)
        act = self.chance.choice(
            [self.deliver, self.deliver, self.council, self.council, self.train, self.seal]
        )
        self.now += self.chance.choice([0.0, 0.01, 0.05])
        act(rank)

    def deliver(self, rank: Rank) -> None:
        lines = [line for (_, to), line in self.lines.under_way.items() if to == rank.rank and line]
        if lines:
            line = self.chance.choice(lines)
            source = next(pair[0] for pair, other in self.lines.under_way.items() if other is line)
            self.lines.arrived[rank.rank].append((source, line.popleft()))

    def council(self, rank: Rank) -> None:
        try:
            rank.council._poll()
        except PeerLost as error:  # as its own thread would
            rank.council._give_up(error)

    def train(self, rank: Rank) -> None:
        if rank.step <= min(other.step for other in self.living) + 1:
            rank.train()

    def seal(self, rank: Rank) -> None:
        rank.seal()

    def settle(self, seconds_max: float = 700.0) -> None:
        """Finish: deliver every message, reach every due step, seal every slice."""
        until, quiet_since = self.now + seconds_max, self.now
        coordinator = self.ranks[0].coordinator
        assert coordinator is not None
        while self.now < until and (coordinator._coordinator.open or self.now < quiet_since + 15.0):
            for rank in self.living:
                for _ in range(10):
                    self.deliver(rank)
                self.council(rank)
                rank.seal()
            if any(rank.is_due for rank in self.living):
                for rank in self.living:
                    self.train(rank)
            if self.is_busy:
                quiet_since = self.now
            self.now += 0.05 if self.is_busy else 1.0

    @property
    def is_busy(self) -> bool:
        under_way = (line for (_, to), line in self.lines.under_way.items() if to not in self.lines.dead)
        return any(under_way) or any(
            rank.unsealed or rank.is_due or rank.council._outbox for rank in self.living
        )

    def events(self, name: str) -> list[dict[str, Any]]:
        return (
            [line for line in read_events(self.path) if line["event"] == name] if self.path.exists() else []
        )


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test run the councils' turns instead of threads."""
    monkeypatch.setattr(CommitVotes, "_run", lambda _self: None)


def play(seed: int, path: Path) -> World:
    """Send some notices to random ranks at random times; they end in one checkpoint of all ranks, or a reason."""
    world = World(seed, path)
    for rank in world.ranks:
        for _ in range(world.chance.randint(0, 2)):
            rank.train()
    told = world.chance.randint(1, 3)
    for _ in range(told):
        rank = world.chance.choice(world.ranks)
        rank.council.send_notice(notice(1000.0))
        for _ in range(world.chance.choice([0, 10, 300])):
            world.turn()
    world.settle()
    return world


def check(world: World) -> None:
    """Assert the invariants that hold after every schedule."""
    acted = [rank.acted for rank in world.ranks]
    assert all(one == acted[0] for one in acted), acted
    assert not any(rank.is_due for rank in world.ranks), "a rank would wait at a step"
    for event in world.events("emergency_staged"):
        order = (1, event["saved_step"])
        assert all((FAR, order) in rank.sealed for rank in world.ranks)
        assert all(StepVerdict(FAR, order, complete=True) in rank.verdicts for rank in world.ranks)


def test_all_ranks_save_one_step_whatever_comes_first(tmp_path: Path) -> None:
    staged = 0
    for seed in range(SCHEDULES):
        world = play(seed, tmp_path / str(seed))
        check(world)
        assert len(world.ranks[0].acted) == len(world.events("emergency")), seed
        failed = world.events("emergency_failed")
        staged += len(world.events("emergency_staged"))
        assert world.events("emergency_staged") or failed, seed
        assert world.declines or not failed, seed
    assert staged > SCHEDULES * 0.9


def test_when_rank_0_dies_no_rank_waits_for_it(tmp_path: Path) -> None:
    waited = 0
    for seed in range(SCHEDULES // 4):
        world = World(seed, tmp_path / str(seed), ranks=3)
        world.ranks[1].council.send_notice(notice(1000.0))
        for _ in range(world.chance.randrange(100)):
            world.turn()
        waited += any(rank.waits for rank in world.ranks[1:])
        world.lines.dead.add(0)
        world.settle(seconds_max=20.0)
        for rank in world.living:
            assert not rank.is_due, seed
            assert rank.council.problem is not None, seed
    assert waited, "no schedule had a rank wait for the word of rank 0"


def test_when_another_rank_dies_the_others_hear_that_no_checkpoint_can_be_whole(tmp_path: Path) -> None:
    for seed in range(SCHEDULES // 4):
        world = World(seed, tmp_path / str(seed), ranks=3)
        world.ranks[0].council.send_notice(notice(1000.0))
        for _ in range(world.chance.randrange(100)):
            world.turn()
        told = bool(world.events("notice"))
        world.lines.dead.add(2)
        world.settle(seconds_max=1100.0)
        assert world.ranks[0].acted == world.ranks[1].acted, seed
        assert not any(rank.is_due for rank in world.living), seed
        ends = [world.events("emergency_staged"), world.events("emergency_failed")]
        assert sum(map(len, ends)) == 1, seed
        assert told or "rank 2 is dead" in ends[1][0]["reason"], seed


def test_a_rank_that_has_ended_is_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    world = World(1, tmp_path / "events", ranks=2)
    world.ranks[1].council._send_root(wire.encode(Kind.BYE))
    world.settle(seconds_max=5.0)
    world.ranks[0].council.send_notice(notice(100.0))
    world.settle(seconds_max=5.0)
    (failed,) = world.events("emergency_failed")
    assert failed["reason"] == "no checkpoint can be whole: rank 1 has ended"
    assert world.ranks[0].acted == world.ranks[1].acted == []


def test_a_step_that_makes_no_sense_is_left_out_and_nobody_waits_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(1, tmp_path / "events", ranks=2)
    rank = world.ranks[1]
    rank.agreed_steps.handle(Announcement(AnnouncementKind.PROPOSED, 0, 1))
    assert rank.waits
    for message in (
        wire.encode(Kind.SAVE_AT),
        wire.encode(Kind.SAVE_AT, flags=9),
        wire.encode(Kind.SAVE_AT, flags=1, arg=1, body=b"{}"),
    ):
        world.lines.arrived[1].append((0, message))
    world.settle(seconds_max=5.0)
    assert caplog.text.count("rank 1: ignores a step to save after a notice") == 3
    assert rank.council.problem is None
    assert not rank.is_due


def test_when_the_council_has_given_up_a_notice_is_said_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(1, tmp_path / "events", ranks=2)
    world.lines.dead.add(0)
    world.settle(seconds_max=5.0)
    world.ranks[1].council.send_notice(notice(100.0))
    assert "the ranks no longer agree on anything, so no extra checkpoint is taken" in caplog.text
    assert not world.ranks[1].council._outbox
