"""Ranks and a decider that agree on steps, with messages delivered by the test: for notices and intervals."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from holdfast.notices.messages import Announcement, AnnouncementKind, Effect, EventLine, StepAnswer
from holdfast.notices.notice import Notice, NoticeKind
from holdfast.notices.preemption import PreemptionCoordinator
from holdfast.notices.should_save import InFlight
from holdfast.wire.pace import PaceRequest
from stager.interval_agreement import IntervalAgreement
from trainer_side.notice.agreed_steps import AgreedSteps
from trainer_side.pace.schedule import Schedule, SchedulePhase

WHY = "every n steps: because"
PROPOSED, APPOINTED, CALLED_OFF = (
    AnnouncementKind.PROPOSED,
    AnnouncementKind.APPOINTED,
    AnnouncementKind.CALLED_OFF,
)


def terminate(seconds: float) -> Notice:
    return Notice(NoticeKind.TERMINATE, time.time() + seconds, "aws")


class AgreeingRank(ABC):
    """A rank's link and training in one thread. `user`: user of the promises."""

    def __init__(self, user: AgreedSteps | Schedule) -> None:
        self.promises = user.promises
        self.inbox: deque[Announcement] = deque()
        self.answers: deque[StepAnswer] = deque()
        self.step = -1
        self.acted: list[tuple[int, object]] = []  # step, agreement

    @abstractmethod
    def take(self, said: Announcement) -> StepAnswer | None: ...

    @abstractmethod
    def reach(self) -> None:
        """Let training finish `step`."""

    def hear(self) -> None:
        answer = self.take(self.inbox.popleft())
        if answer is not None:
            self.answers.append(answer)

    @property
    def waits(self) -> bool:
        """Whether training would block in its next `reach`, which the test's only thread must avoid."""
        return self.promises.waits_at(self.step + 1)

    def train(self) -> None:
        if not self.waits:
            self.step += 1
            self.reach()


class NoticeRank(AgreeingRank):
    def __init__(self) -> None:
        self.agreed_steps = AgreedSteps(wait_seconds_max=30, clock=lambda: 0.0)
        super().__init__(self.agreed_steps)

    def take(self, said: Announcement) -> StepAnswer | None:
        return self.agreed_steps.handle(said)

    def reach(self) -> None:
        before = self.agreed_steps.notice
        due = self.agreed_steps.reach(self.step)
        assert (self.agreed_steps.notice is not before) == (due is not None), (
            "it changes at the same step on all"
        )
        if due is not None:
            self.acted.append((self.step, due.save))


class IntervalRank(AgreeingRank):
    def __init__(self, *, auto: bool = True) -> None:
        self.schedule = Schedule(auto=auto, wait_seconds_max=0.0)
        self.saved: list[int] = []
        self.cut = False
        super().__init__(self.schedule)

    def take(self, said: Announcement) -> StepAnswer | None:
        return None if self.cut else self.schedule.handle(said, 0.1)

    def reach(self) -> None:
        before = self.schedule._pace
        if self.schedule.reach(self.step):
            self.saved.append(self.step)
        if self.schedule._pace is not before and self.schedule.phase is SchedulePhase.PACED:
            self.acted.append((self.step, self.schedule.every))

    def give_up(self) -> None:
        """Train on, even if a promised step got no answer."""
        self.step += 1
        self.reach()

    def lose(self) -> None:
        """Let the rank's link give up on the stager."""
        self.cut = True
        self.inbox.clear()
        self.answers.clear()
        self.schedule.end()


class AgreeingJob(ABC):
    """Common part of both users. `agreed`, `given_up`: names of the events."""

    agreed = given_up = ""

    def __init__(self, ranks: Sequence[AgreeingRank]) -> None:
        self._ranks = ranks
        self.said: list[EventLine] = []
        self.proposed: list[int] = []
        self.now = 0.0

    @property
    @abstractmethod
    def decider(self) -> PreemptionCoordinator | IntervalAgreement: ...

    @abstractmethod
    def begin(self, number: int) -> None:
        """Let the decider request an agreement; another `number` is another request."""

    @abstractmethod
    def follow(self, step: int) -> None:
        """Let the decider request another agreement, after rank 0 has reached the appointed `step`."""

    @abstractmethod
    def lose_rank(self, rank: int, reason: str) -> None: ...

    def take(self, rank: int, answer: StepAnswer) -> list[Effect]:
        return self.decider.on_answer(rank, answer, self.now)

    def do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, EventLine):
                self.said.append(effect)
                continue
            if effect.kind is PROPOSED:
                self.proposed.append(effect.step)
            for rank in self._ranks:
                self.send(rank, effect)

    def send(self, rank: AgreeingRank, said: Announcement) -> None:
        rank.inbox.append(said)

    def answer(self, index: int) -> None:
        self.do(self.take(index, self._ranks[index].answers.popleft()))

    def tick(self, now: float) -> None:
        self.now = now
        self.do(self.decider.tick(now))

    def deliver(self) -> None:
        """Deliver all messages in flight, to each rank and back."""
        for index, rank in enumerate(self._ranks):
            while rank.inbox:
                rank.hear()
            while rank.answers:
                self.answer(index)

    def settle(self) -> None:
        """Deliver all messages in flight, and let every rank reach the appointed step."""
        for _ in range(10_000):
            self.deliver()
            due = [rank for rank in self._ranks if rank.promises.pending]
            if not due and not any(rank.inbox or rank.answers for rank in self._ranks):
                return
            for rank in due:
                rank.train()
        raise AssertionError("the ranks come to no end")

    def events(self) -> list[str]:
        return [said.event for said in self.said]


class NoticeJob(AgreeingJob):
    agreed, given_up = "emergency", "emergency_failed"

    def __init__(self, ranks: int, in_flight: Sequence[InFlight] = ()) -> None:
        self.ranks = [NoticeRank() for _ in range(ranks)]
        self.emergency = PreemptionCoordinator(ranks, lambda: list(in_flight), answer_seconds_max=10.0)
        super().__init__(self.ranks)

    @property
    def decider(self) -> PreemptionCoordinator:
        return self.emergency

    def notice(self, rank: int, notice: Notice, left: float | None) -> None:
        self.do(self.emergency.on_notice(rank, notice, left, f"rank {rank}", self.now))

    def begin(self, number: int) -> None:
        self.notice(number % len(self.ranks), terminate(100), 100.0)

    def follow(self, step: int) -> None:
        self.emergency.on_offered(step)
        self.do(self.emergency.on_ended(step, "busy", self.now))

    def lose_rank(self, rank: int, reason: str) -> None:
        self.do(self.emergency.on_rank_left(rank, reason, self.now))


class IntervalJob(AgreeingJob):
    agreed, given_up = "interval", "interval_kept"

    def __init__(self, ranks: int) -> None:
        self.ranks = [IntervalRank() for _ in range(ranks)]
        self.interval = IntervalAgreement(ranks, answer_seconds_max=10.0)
        self.dead = False
        self.dies_after: int | None = None  # the stager dies after this many more messages
        super().__init__(self.ranks)

    @property
    def decider(self) -> IntervalAgreement:
        return self.interval

    def wish(self, every: int) -> None:
        if not self.dead:
            self.do(self.interval.on_request(PaceRequest(every, self.ranks[0].step, WHY), self.now))

    def begin(self, number: int) -> None:
        self.wish(10 + number)

    def follow(self, step: int) -> None:
        self.wish(1000 + step)

    def lose_rank(self, rank: int, reason: str) -> None:
        self.do(self.interval.on_rank_left(reason, lost=True))

    def send(self, rank: AgreeingRank, said: Announcement) -> None:
        if self.dies_after is not None:
            self.dead = self.dead or self.dies_after == 0
            self.dies_after = max(0, self.dies_after - 1)
        if not self.dead:
            rank.inbox.append(said)

    def take(self, rank: int, answer: StepAnswer) -> list[Effect]:
        if self.dead:
            return []
        refusal = str(answer.body.get("refusal", ""))
        if refusal:
            return self.interval.on_refusal(rank, answer.number, refusal)
        return super().take(rank, answer)

    def deliver(self) -> None:
        super().deliver()
        for rank in self.ranks:
            if self.dead and not rank.cut:
                rank.lose()

    def abreast(self, steps: int) -> int:
        """Train until all ranks are at the same step, `steps` above the first one's; return the starting step."""
        begin = max(rank.step for rank in self.ranks)
        for rank in self.ranks:
            while rank.step < begin + steps:
                rank.train()
        return begin
