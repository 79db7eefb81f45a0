"""How many steps `save()` accepts while others are in flight, with a simulated link."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError, PeerLost
from holdfast.image.layout import Layout
from holdfast.image.save_record import SaveRecord
from holdfast.notices.messages import Announcement, AnnouncementKind
from holdfast.notices.notice import Notice, NoticeKind, SaveInstruction
from holdfast.ring.remains import FetchKind
from holdfast.telemetry.causes import DeclineCause, Reason
from holdfast.wire import frames as wire
from holdfast.wire.doubt import Doubt
from holdfast.wire.frames import Kind
from holdfast.wire.layout_round import LayoutRound
from holdfast.wire.state_messages import Agreement, Proposal
from trainer_side import joining
from trainer_side.checkpointer import Checkpointer
from trainer_side.link.inbox import StagerInbox
from trainer_side.link.job_state import JobState
from trainer_side.link.stager_message import StagerMessage
from trainer_side.notice.agreed_steps import AgreedSteps
from trainer_side.pace.schedule import Schedule
from trainer_side.save.staging import Staging
from trainer_side.transfer import Transfer, TransferState

SECONDS_MAX = 60.0


class FakeLink:
    """Accepts every offer, and sends it when the test allows that."""

    def __init__(self) -> None:
        self.job = JobState(0, 1, store_url="/run", chunk_bytes=4096, attempt=1)
        self.offers: dict[int, tuple[Transfer, Staging]] = {}
        self.declined: dict[int, Reason] = {}
        self.needed_pickle_bytes = 0
        self.layouts: list[Layout] = []
        self.agreed_steps = AgreedSteps(wait_seconds_max=SECONDS_MAX)
        self.schedule = Schedule(auto=False, wait_seconds_max=SECONDS_MAX)
        self.inbox = StagerInbox(0, self.agreed_steps, self.schedule)
        self.notices: list[Notice] = []
        self.doubts: list[Doubt] = []
        self.fitting: list[int] = []

    def meet(self, _config: Any, _world: Any, inbox: StagerInbox, _events: Any) -> Self:
        """In place of `joining.connect_stager`."""
        self.inbox = inbox
        self.agreed_steps, self.schedule = inbox._agreed_steps, inbox._schedule
        return self

    def fetch(self, fetch_kind: FetchKind, **_: Any) -> None:
        return

    def send_message(self, message: StagerMessage) -> None:
        frame = wire.decode(message.encode(self.job.attempts))
        match frame.kind:
            case Kind.NOTICE:
                self.notices.append(Notice.from_json(wire.json_body(frame)))
            case Kind.DOUBT:
                self.doubts.append(Doubt.from_frame(frame))
            case Kind.FITS:
                self.fitting.append(frame.step)

    def appoint(self, step: int, terms: SaveInstruction) -> None:
        """As the stager does, once every rank has promised the step."""
        assert self.agreed_steps.handle(Announcement(AnnouncementKind.PROPOSED, step, step)) is not None
        self.agreed_steps.handle(Announcement(AnnouncementKind.APPOINTED, step, step, terms.to_json()))

    def agree(self, proposal: Proposal, **_: Any) -> Agreement:
        agreed = LayoutRound(1, SECONDS_MAX).propose(0, proposal, 0.0)
        assert isinstance(agreed, Agreement)
        return Agreement(
            2 * proposal.pickle_bytes + 4096, {}, patterns=agreed.patterns, split_rows=agreed.split_rows
        )

    def offer(self, step: int, source: Staging, record: SaveRecord, layout: Layout) -> Transfer:
        if layout not in self.layouts:
            self.layouts.append(layout)
        transfer = Transfer(step, record)
        self.offers[step] = transfer, source
        return transfer

    def decline_reason(self, _step: int) -> None:
        return None

    def decline(self, step: int, reason: Reason, *, needed_pickle_bytes: int = 0) -> None:
        self.needed_pickle_bytes = needed_pickle_bytes
        self.declined[step] = reason
        if step in self.offers:
            self.offers[step][0].released.set()

    def stage(self, step: int) -> None:
        transfer, _ = self.offers[step]
        transfer.set_state(TransferState.STAGED)
        transfer.released.set()

    def bytes_of(self, step: int) -> bytes:
        """All of the staging area, once the copy is done."""
        _, area = self.offers[step]
        frames = sorted(area._frame_at)
        deadline = time.monotonic() + SECONDS_MAX
        while not all(map(area.is_ready, frames)):
            assert time.monotonic() < deadline, f"step {step} is never ready"
            time.sleep(0.001)
        return bytes(area.view(0, area.area_bytes))

    def close(self, **_: Any) -> None:
        return


class Rank:
    """A model whose parameters all hold the step number, and its checkpointer."""

    def __init__(self, link: FakeLink, **settings: Any) -> None:
        self.link = link
        self.model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(1000)) for _ in range(20))
        self.note = [1]
        self.state: dict[str, Any] = {"model": self.model, "note": self.note}
        ends_soon = {"on_not_durable": "warn", "close_seconds_max": 0.1}  # no store is behind the link
        self.checkpointer = Checkpointer(self.state, config=TrainerConfig(**{**ends_soon, **settings}))

    def save(self, step: int) -> bool:
        self.checkpointer._copier.gate.wait()  # as an optimizer would: there is none
        with torch.no_grad():
            for parameter in self.model:
                parameter.fill_(step + 1)
        return self.checkpointer.save(step)

    def holds(self, step: int) -> bool:
        """Whether what is sent for `step` is of that step, and of no other."""
        image = self.link.bytes_of(step)
        return image.count(torch.full((1000,), float(step + 1)).numpy().tobytes()) == len(self.model)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> FakeLink:
    found = FakeLink()
    monkeypatch.setattr(joining, "connect_stager", found.meet)
    return found


@pytest.mark.parametrize("areas", [1, 2, 3])
def test_a_rank_takes_as_many_steps_as_there_are_areas(link: FakeLink, areas: int) -> None:
    rank = Rank(link, in_flight_max=areas)
    assert [rank.save(step) for step in range(5)] == [True] * areas + [False] * (5 - areas)
    assert set(link.declined) == set(range(areas, 4)), "training may end with step 4"
    assert link.fitting == [*range(areas, 5)], (
        "a rank that asks for another layout must not wait for this one"
    )
    which = "the checkpoint before is" if areas == 1 else f"the {areas} checkpoints before are"
    assert set(link.declined.values()) == {DeclineCause.BUSY.because(f"{which} still being sent")}
    assert all(rank.holds(step) for step in range(areas)), "a copy went into an area that is being sent"
    link.stage(0)
    assert rank.save(5)
    assert set(link.declined) == set(range(areas, 5))
    assert rank.holds(5)
    assert all(rank.holds(step) for step in range(1, areas))
    assert len({id(area) for _, area in link.offers.values()}) == areas
    rank.checkpointer.close()


def test_a_save_sets_off_no_garbage_collection(link: FakeLink) -> None:
    rank = Rank(link)
    rank.model.extend(torch.nn.Parameter(torch.zeros(1)) for _ in range(1000))
    searches = [0] * 4
    saving = False

    def note(phase: str, _: dict[str, int]) -> None:
        searches[step] += phase == "start" and saving

    gc.callbacks.append(note)
    try:
        for step in range(4):
            gc.collect()
            saving = True
            assert rank.save(step)
            saving = False
            link.bytes_of(step)
            link.stage(step)
            assert gc.isenabled()
    finally:
        gc.callbacks.remove(note)
        rank.checkpointer.close()
    # What is kept until the copy is done, a thousand sources, may set off one at the end of each of two pauses. Without
    # pauses each save has 5, and the first one, which plans, 94.
    assert max(searches) <= 2


def test_restore_sets_off_no_search_for_garbage(
    link: FakeLink, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []

    def fetch(_: FakeLink, asked: FetchKind, **_more: Any) -> None:
        seen.append((asked, gc.isenabled()))

    monkeypatch.setattr(FakeLink, "fetch", fetch)
    link.job.store_url = str(tmp_path)
    rank = Rank(link)
    assert rank.checkpointer.restore() == 0
    assert seen == [(FetchKind.HELD, False)]
    assert gc.isenabled()
    rank.checkpointer.close()


def test_wait_waits_for_the_oldest_only(link: FakeLink, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(link, in_flight_max=2, on_full="wait")
    assert rank.save(0)
    assert rank.save(1)
    assert rank.checkpointer.stats.wait_seconds == 0
    waits, oldest = threading.Event(), link.offers[0][0].settled
    wait = oldest.wait

    def noted(seconds_max: float | None = None) -> bool:
        waits.set()
        return wait(seconds_max)

    def stage() -> None:
        assert waits.wait(SECONDS_MAX)
        link.stage(0)

    monkeypatch.setattr(oldest, "wait", noted)
    stager = threading.Thread(target=stage)
    stager.start()
    assert rank.save(2)
    assert oldest.is_set()
    assert not link.offers[1][0].released.is_set()
    assert rank.checkpointer.stats.wait_seconds > 0
    assert link.fitting == [2], "a rank that asks for another layout must not wait as long"
    stager.join()
    rank.checkpointer.close()


def test_a_wait_that_is_too_long_names_the_oldest(link: FakeLink) -> None:
    rank = Rank(link, in_flight_max=2, on_full="wait", full_seconds_max=0.1)
    assert rank.save(3)
    assert rank.save(4)
    assert not rank.save(5)
    assert link.declined[5].text.startswith("late: rank 0 waited 0.1 s for step 3 to be staged, and")
    rank.checkpointer.close()


def test_new_tensors_wait_for_all_areas(link: FakeLink) -> None:
    rank = Rank(link, in_flight_max=2, full_seconds_max=0.1)
    assert rank.save(0)
    assert rank.save(1)
    rank.model.append(torch.nn.Parameter(torch.zeros(1000)))
    assert rank.save(2)
    assert set(link.declined) == {0, 1}, "both are given up for the new layout"
    assert all("its tensors have changed since" in reason.text for reason in link.declined.values())
    assert len(link.layouts) == 2
    assert rank.holds(2)
    rank.checkpointer.close()


def test_a_limit_of_memory_decides_how_many_areas_there_are(link: FakeLink) -> None:
    rank = Rank(link, in_flight_max=8, host_bytes_max="250KiB")  # the image has some 90
    assert [rank.save(step) for step in range(4)] == [True, True, False, False]
    assert rank.checkpointer._parts.areas.nbytes <= 250 << 10
    rank.checkpointer.close()


def test_a_limit_below_one_area_is_said_at_the_first_save(link: FakeLink) -> None:
    rank = Rank(link, host_bytes_max="50KiB")
    with pytest.raises(
        ConfigError, match=r"host_bytes_max: expected at least \d+ bytes.*got 51200; raise it"
    ):
        rank.save(0)
    rank.checkpointer.close()


def test_an_area_is_not_kept_by_the_copy_thread(link: FakeLink) -> None:
    """Else a new layout would need the memory of two."""
    rank = Rank(link)
    assert rank.save(0)
    assert rank.holds(0)
    assert not rank.checkpointer._copier.wait()
    assert rank.checkpointer._copier._job is None
    rank.checkpointer.close()


def steps_begun(rank: Rank, steps: range) -> list[int]:
    """Return the steps, of these, that `step()` has saved, each staged before the next."""
    begun = []
    for step in steps:
        rank.checkpointer._copier.gate.wait()
        if rank.checkpointer.step(step):
            begun.append(step)
            rank.link.bytes_of(step)
            rank.link.stage(step)
    return begun


def event_text(rank: Rank) -> int:
    """Which rank was told, as far as this one knows; -1: none."""
    notice = rank.checkpointer.notice
    return -1 if notice is None else notice.rank


_END = Notice(NoticeKind.TERMINATE, 2e9, "aws", rank=3)


def test_step_saves_at_the_interval_and_at_the_appointed_step(link: FakeLink) -> None:
    rank = Rank(link)
    rank.checkpointer._every = 10
    assert steps_begun(rank, range(12)) == [9]
    link.appoint(14, SaveInstruction(True, "there is time", _END))
    assert steps_begun(rank, range(12, 14)) == []
    assert event_text(rank) == -1
    assert steps_begun(rank, range(14, 31)) == [14, 19, 29]
    assert event_text(rank) == 3
    link.appoint(39, SaveInstruction(True, "there is time", _END))
    assert steps_begun(rank, range(31, 41)) == [39]  # due twice, saved once


def test_metrics_travel_with_the_step_that_is_saved(link: FakeLink, caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank(link)
    rank.checkpointer._every = 2
    for step in range(6):
        rank.checkpointer._copier.gate.wait()
        metrics = {"loss": torch.tensor(step / 4)}
        saved = rank.checkpointer.step(step, metrics=metrics)
        if saved or (step == 4 and rank.checkpointer.save(4, metrics=metrics)):
            link.bytes_of(step)
            link.stage(step)
    rank.checkpointer.close()
    records = {step: transfer.record.metrics for step, (transfer, _) in link.offers.items()}
    assert records == {1: {"loss": 0.25}, 3: {"loss": 0.75}, 4: {"loss": 1.0}, 5: {"loss": 1.25}}
    lost = [line for line in caplog.messages if "are lost" in line]
    assert [line.partition(":")[0] for line in lost] == ["the metrics of step 0 are lost"]


def test_metrics_of_a_last_step_that_finds_room_at_the_end_are_saved(link: FakeLink) -> None:
    rank = Rank(link)
    assert rank.save(0)
    link.bytes_of(0)
    assert not rank.checkpointer.save(1, metrics={"loss": 0.5})
    link.stage(0)
    rank.checkpointer.close()
    assert link.offers[1][0].record.metrics == {"loss": 0.5}


def test_a_notice_that_comes_too_late_saves_nothing_and_can_be_seen(link: FakeLink) -> None:
    rank = Rank(link)
    link.appoint(3, SaveInstruction(False, "the deadline has passed", _END))
    assert steps_begun(rank, range(6)) == []
    assert rank.checkpointer.notice is not None


def test_after_a_rebalance_the_interval_is_shorter_for_a_while(link: FakeLink) -> None:
    rank = Rank(link)
    rank.checkpointer._every = 8
    link.appoint(
        3, SaveInstruction(True, "there is no deadline", Notice(NoticeKind.REBALANCE, None, "aws"), 4, 11)
    )
    assert steps_begun(rank, range(33)) == [3, 5, 7, 9, 11, 15, 23, 31]


def test_auto_saves_where_the_schedule_says_and_at_the_appointed_step(link: FakeLink) -> None:
    rank = Rank(link, every="auto")
    link.appoint(20, SaveInstruction(True, "there is time", Notice(NoticeKind.REBALANCE, None, "aws"), 4, 40))
    assert steps_begun(rank, range(70)) == [15, 20, 23, 31, 63]
    link.schedule.handle(Announcement(AnnouncementKind.PROPOSED, 71, 1))
    link.schedule.handle(Announcement(AnnouncementKind.APPOINTED, 71, 1, {"first": 73, "every": 10}))
    assert steps_begun(rank, range(70, 100)) == [73, 83, 93]


def test_auto_without_a_stager_is_refused(tmp_path: Path) -> None:
    config = TrainerConfig(tiers=["memory"], store=str(tmp_path))
    with pytest.raises(ConfigError, match='every="auto" needs a stager'):
        Checkpointer({"value": torch.zeros(1)}, config=config, every="auto")


def test_numbers_that_leave_steps_out_save_at_the_first_one_after(link: FakeLink) -> None:
    rank = Rank(link)
    link.appoint(5, SaveInstruction(True, "there is time", _END))
    assert steps_begun(rank, range(0, 40, 10)) == [10]


def test_the_watch_tells_the_link(link: FakeLink) -> None:
    rank = Rank(link, watch=("sigusr1",), watch_seconds=3600)
    os.kill(os.getpid(), signal.SIGUSR1)
    deadline = time.monotonic() + SECONDS_MAX
    while not link.notices:
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)
    assert link.notices[0].source == "sigusr1"
    rank.checkpointer.close()
    os.kill(os.getpid(), signal.SIGUSR1)  # which kills a process that has no handler any more
    assert len(link.notices) == 1


def test_a_notice_after_the_loss_of_the_stager_is_logged_as_an_error(
    link: FakeLink, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(link)
    link.job.mark_lost(PeerLost("its process is dead"))
    rank.checkpointer._parts.notices._receive(_END)
    assert "the stager is lost, so no step is named" in caplog.text
    assert len(link.notices) == 1, "the link keeps it for the next stager"
    rank.checkpointer.close()


def test_values_that_outgrow_the_room_they_were_just_given_decline_another_step(link: FakeLink) -> None:
    rank = Rank(link)
    assert rank.save(0)
    link.stage(0)

    def grow(count: int) -> None:
        rank.note[:] = range(1 << 20, (1 << 20) + count)

    grow(10_000)
    assert not rank.save(1)
    needed = link.needed_pickle_bytes
    assert needed > 10_000
    link.job.grow_pickle_reserve(2 * needed)  # as the stager gives
    grow(50_000)
    assert not rank.save(2), "the room that was given is too small by now"
    assert link.needed_pickle_bytes > link.job.new_pickle_reserve_bytes
    assert {reason.cause for reason in link.declined.values()} == {"outgrown"}
    grow(10_000)
    assert rank.save(3)
    assert len(link.layouts) == 2, (
        "other ranks have made the new plan: this one must not go on with the old one"
    )


def test_numbers_that_outgrow_the_room_after_the_save_give_the_step_up_and_the_next_one_asks_for_more(
    link: FakeLink,
) -> None:
    rank = Rank(link)
    rank.note[:] = [1] * 100
    for step in (0, 1):
        assert rank.save(step)
        link.stage(step)
    rank.note[:] = [1 << 2000] * 100
    assert rank.save(2), "only the pickle could tell, and it is made behind the gate"
    deadline = time.monotonic() + SECONDS_MAX
    while 2 not in link.declined:
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)
    assert not link.needed_pickle_bytes
    assert not rank.save(3)
    assert link.needed_pickle_bytes > 20_000
    assert {reason.cause for reason in link.declined.values()} == {"outgrown"}
    link.job.grow_pickle_reserve(2 * link.needed_pickle_bytes)
    assert rank.save(4)
    rank.checkpointer.close()


def test_a_job_that_took_no_checkpoint_says_why(link: FakeLink, caplog: pytest.LogCaptureFixture) -> None:
    checkpointer = Rank(link, every=0).checkpointer
    checkpointer.step(0)
    checkpointer.close()
    assert [line for line in caplog.messages if line.startswith("no checkpoint was taken: every=0")]
