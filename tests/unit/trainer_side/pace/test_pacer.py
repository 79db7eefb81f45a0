"""The pacer over a real event log, optimizer and schedule; the test acts as the stager."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError
from holdfast.notices.messages import Announcement, AnnouncementKind
from holdfast.telemetry.events import EventLog
from holdfast.wire.failure_count import NO_FAILURES, FailureCount
from holdfast.wire.pace import PaceRequest
from trainer_side.pace.pacer import Pacer
from trainer_side.pace.schedule import Schedule, chosen_interval

_OFTEN = 1e-3  # mtbf_hours with which the shortest interval within the bound is the best one


class Rank:
    """Trains in steps of 0.1 s; the test decides the fate of each checkpoint."""

    def __init__(
        self, path: Path, *, rank: int = 0, seen: FailureCount = NO_FAILURES, **settings: object
    ) -> None:
        self.now, self.step, self.wishes = 100.0, -1, list[PaceRequest]()
        self.path, self.events = path, EventLog(path, role="trainer", rank=rank)
        self.schedule = Schedule(auto=True, wait_seconds_max=1)
        self.parameter = torch.nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.1)
        config = TrainerConfig.model_validate(settings)
        wish = self.wishes.append if rank == 0 else None
        self.pacer = Pacer(
            self.schedule, wish, config, self.events, [self.optimizer], observed=seen, clock=lambda: self.now
        )
        self.events.emit("plan", {"image_bytes": 2000, "slice_bytes": 1000, "in_flight_max": 1})

    def train(self, steps: int = 1, *, durable: float | None = 0.2, stall: float = 0.001) -> list[int]:
        """The steps at which it saved; `durable`: after how long each was; None: never."""
        saved = []
        for _ in range(steps):
            self.parameter.grad = torch.zeros(3)
            self.optimizer.step()
            self.now += 0.1
            self.step += 1
            due = self.pacer.reach(self.step, lambda usual: usual)
            self.pacer.on_step_end(self.step, due=due, saved=due)
            if due:
                saved.append(self.step)
                times = {"cst_seconds": stall, "copy_seconds": 0.01, "slice_bytes": 1000}
                self.events.emit("save", times, step=self.step)
                if durable is not None:
                    times |= {"staged_seconds": durable, "durable_seconds": durable}
                    self.events.emit("staged", times, step=self.step)
                    self.events.emit("durable", times, step=self.step)
        return saved

    def appoint(self) -> None:
        """As the stager does with the newest wish."""
        wish, step = self.wishes[-1], self.step + 1
        self.schedule.handle(Announcement(AnnouncementKind.PROPOSED, step, step))
        pace = {"first": wish.after + wish.every, "every": wish.every}
        self.schedule.handle(Announcement(AnnouncementKind.APPOINTED, step, step, pace))

    def written(self, event: str) -> list[dict[str, object]]:
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [line for line in lines if line["event"] == event]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_the_pacer_profiles_wishes_and_follows_the_appointment(path: Path) -> None:
    rank = Rank(path, overhead_max=0.03, dollars_per_hour=36.0, mtbf_hours=_OFTEN)
    assert rank.train(31) == [15]
    assert rank.wishes == [], "of the first checkpoint nothing is concluded"
    assert rank.train(2) == [31]
    (wish,) = rank.wishes
    assert (wish.every, wish.after) == (2, 31)
    assert wish.why == (
        "every 2 steps: 0.5 % stall, expected loss 0.3 s or $0.00 per preemption; "
        "failures: one in 4 s, as set (mtbf_hours)"
    )
    (profile,) = rank.written("profile")
    assert profile["iteration_seconds"] == pytest.approx(0.1)
    assert profile["image_bytes"] == 2000
    assert profile["update_seconds"] is not None
    assert not rank.optimizer._optimizer_step_pre_hooks, "the gate has its hooks to itself again"
    rank.appoint()
    assert rank.train(6) == [33, 35, 37]
    assert len(rank.wishes) == 1


def test_a_slow_store_makes_it_longer_before_anything_is_durable_and_relief_shorter(path: Path) -> None:
    rank = Rank(path, mtbf_hours=_OFTEN)
    rank.train(33)
    rank.appoint()
    rank.train(20)
    before = len(rank.wishes)
    rank.train(20, durable=None)
    longer = rank.wishes[before]
    assert longer.every > 3
    slow = Rank(path, mtbf_hours=_OFTEN)
    slow.train(33, durable=5.0)
    slow.appoint()
    slow.train(200, durable=5.0)
    assert {wish.every for wish in slow.wishes} == {50}
    slow.train(400, durable=0.4)
    assert slow.wishes[-1].every == 4


def test_failures_that_the_run_has_seen_shorten_the_interval_and_a_set_mtbf_wins(path: Path) -> None:
    def first_wish(seen: FailureCount, mtbf_hours: float | None = None) -> PaceRequest:
        rank = Rank(path, seen=seen, mtbf_hours=mtbf_hours)
        rank.train(33)
        return rank.wishes[0]

    none, three = first_wish(FailureCount()), first_wish(FailureCount(3, 600.0))
    assert none.every == pytest.approx(46, abs=1), "Daly: sqrt(2 × 0.001 s × 3 h) is 4.6 s of 0.1 s each"
    assert three.every == pytest.approx(none.every / 2, abs=1), "four times the hazard, half the interval"
    assert "; failures: 0 in 2 s observed, prior 1 in 3 h → one in 3 h" in none.why
    assert "; failures: 3 in 10 min observed, prior 1 in 3 h → one in 48 min" in three.why
    typed = first_wish(FailureCount(3, 600.0), mtbf_hours=3.0)
    assert typed.every == none.every
    assert typed.why.endswith("failures: one in 3 h, as set (mtbf_hours)")


def test_the_time_of_this_job_counts_from_its_first_checkpoint(path: Path) -> None:
    rank = Rank(path)
    rank.train(33)
    rank.appoint()
    rank.now += 240 * 3600.0  # ten days without a failure
    rank.train(400)
    assert rank.wishes[-1].every > 6 * rank.wishes[0].every
    assert "failures: 0 in 240 h observed, prior 1 in 3 h → one in 243 h" in rank.wishes[-1].why


def test_a_bound_that_cannot_be_kept_is_in_the_line(path: Path) -> None:
    rank = Rank(path, overhead_max=0.001, every_seconds_max=2.0)
    rank.train(33, stall=0.05)
    assert rank.wishes[0].every == 20
    assert "Possible" in rank.wishes[0].why


def test_other_ranks_measure_nothing(path: Path) -> None:
    rank = Rank(path, rank=1)
    assert not rank.optimizer._optimizer_step_pre_hooks
    assert rank.train(40) == [15, 31]
    assert rank.wishes == []
    assert rank.written("profile") == []


@pytest.mark.parametrize(
    ("every", "setting", "chosen_every"), [(None, 0, 0), (None, 7, 7), (5, 7, 5), (0, "auto", 0)]
)
def test_the_script_has_the_last_word(every: int | None, setting: int | str, chosen_every: int) -> None:
    assert chosen_interval(every, TrainerConfig.model_validate({"every": setting})) == chosen_every


@pytest.mark.parametrize("every", ["auto", None])
def test_auto_is_no_number(every: str | None) -> None:
    assert chosen_interval(every, TrainerConfig.model_validate({"every": "auto"})) is None


@pytest.mark.parametrize("every", ["sometimes", -1, 2.5, ""])
def test_an_invalid_interval_is_refused(every: object) -> None:
    with pytest.raises(ConfigError, match="every: expected a whole number of at least 0"):
        chosen_interval(every, TrainerConfig())
