"""The copy thread never blocks training for ever, and late copies are not used."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import pytest
import torch

from holdfast.image.save_record import SaveRecord
from holdfast.telemetry.causes import DeclineCause, Reason
from holdfast.telemetry.events import EventLog
from trainer_side.ledger import Ledger
from trainer_side.link.job_state import JobState
from trainer_side.link.link import Link
from trainer_side.save.copier import Copier, CopyJob
from trainer_side.save.copy_plan import Route, Router
from trainer_side.save.fingerprint import Fingerprints
from trainer_side.save.hook_coverage import CopyPolicy
from trainer_side.save.staging import Staging
from trainer_side.state.skeleton import Capture
from trainer_side.tiers.tier_write import TierWrite
from trainer_side.transfer import Transfer

SECONDS_MAX = 60.0


class FakeLink:
    def __init__(self) -> None:
        self.job = JobState(1, 2, store_url="/run", chunk_bytes=4096, attempt=None)
        self.declined: list[tuple[int, Reason]] = []

    def decline(self, step: int, reason: Reason) -> None:
        self.declined.append((step, reason))


class SlowStaging:
    """A staging area that copies when the test allows it."""

    nbytes = 1

    def __init__(self, error: BaseException | None = None) -> None:
        self.go, self.complete = threading.Event(), False
        self.storage = 0
        self._error = error

    def route(
        self, _sources: Sequence[Any], update_order: Callable[[], Mapping[int, int]], *, order_changed: bool
    ) -> Route:
        """Its own router as well."""
        assert order_changed or self.storage
        assert self.storage in update_order()
        return Route((), (), frozenset({self.storage}))

    @staticmethod
    def live_route(route: Route) -> Route:
        return route

    def discard(self) -> None:
        """Nothing is on its way."""

    def copy_gated(
        self,
        _sources: Sequence[Any],
        route: Route,
        *,
        after: Any,
        cancelled: Callable[[], bool],
        release: Callable[[Collection[int]], None],
        on_all_read: Callable[[], None],
        **_looks: Callable[[Any], None],
    ) -> None:
        assert after is None
        assert route.storages == {self.storage}
        assert self.go.wait(SECONDS_MAX)
        if self._error is not None:
            raise self._error
        on_all_read()
        self.complete = not cancelled()


def _made(seconds_max: float) -> tuple[Copier, FakeLink, Ledger, torch.optim.SGD]:
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    link, ledger, events = FakeLink(), Ledger(), EventLog(None, role="trainer")
    copy_policy = CopyPolicy(
        link.job.rank, mode="auto", inside_ms_max=0.0, send_doubt=lambda _: None, ledger=ledger, events=events
    )
    copier = Copier(
        [optimizer],
        cast(Link, link),
        ledger=ledger,
        events=events,
        seconds_max=seconds_max,
        copy_policy=copy_policy,
    )
    return copier, link, ledger, optimizer


def _begin(copier: Copier, staging: SlowStaging, step: int) -> CopyJob:
    ((parameter_storage, _),) = copier.gate.update_order().items()
    staging.storage = parameter_storage
    transfer = Transfer(step, SaveRecord(save_seconds=0.5))
    job = CopyJob(
        transfer, cast(Staging, staging), cast(Router, staging), Capture([], {}, None, (), [], ()), None, None
    )
    copier.close_gate()
    copier.copy(job)
    return job


def test_a_copy_counts_its_stall() -> None:
    copier, link, ledger, optimizer = _made(SECONDS_MAX)
    staging = SlowStaging()
    _begin(copier, staging, 3)
    threading.Timer(0.05, staging.go.set).start()
    optimizer.step()
    assert not copier.wait()
    assert staging.complete
    assert ledger.stats.cst_seconds[0] >= 0.5  # the time in save(), and at the gate if it came there in time
    copier.close()
    assert not link.declined


def test_an_update_waits_until_its_deadline_and_the_copy_is_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    copier, link, _, optimizer = _made(0.05)
    staging = SlowStaging()
    job = _begin(copier, staging, 3)
    optimizer.step()  # comes back
    assert optimizer.param_groups[0]["params"][0].tolist() == [0.0] * 4
    assert job.cancelled()
    assert [step for step, _ in link.declined] == [3]
    assert "rank 1 waited 0.05 s for its own copy thread to end the copy of step 3" in caplog.text
    assert copier.wait() == DeclineCause.COPY_STUCK.because("the copy of step 3 does not end")
    staging.go.set()
    deadline = time.monotonic() + SECONDS_MAX
    while copier.wait() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not staging.complete, "a torn copy was given to the sender"
    copier.close()


@pytest.mark.parametrize("error", [OSError("no memory"), KeyError("a bug"), AssertionError("a bug")])
def test_no_error_ends_the_thread(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    copier, link, _, optimizer = _made(SECONDS_MAX)
    failing = SlowStaging(error)
    _begin(copier, failing, 3)
    failing.go.set()
    optimizer.step()
    assert not copier.wait()
    assert link.declined == [(3, DeclineCause.COPY_FAILED.because(error))]
    assert f"rank 1 gives up step 3: copy failed: {error}" in caplog.text
    good = SlowStaging()
    _begin(copier, good, 4)
    good.go.set()
    assert not copier.wait()
    assert good.complete
    copier.close()


def test_close_does_not_wait_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    copier, link, _, _ = _made(0.05)
    staging = SlowStaging()
    _begin(copier, staging, 9)
    copier.close()
    assert [step for step, _ in link.declined] == [9]
    assert "waited 0.05 s" in caplog.text
    staging.go.set()


class FakeFingerprints:
    def sample_gated(self, _sources: Sequence[Any]) -> None:
        """They are there."""

    def text(self) -> str:
        return "AAAAAA=="

    def digest(self) -> str:
        return "0123456789abcdef"


@pytest.mark.parametrize("lives", [False, True])
def test_ranks_compare_their_replicas_themselves_where_no_stager_does(lives: bool) -> None:
    copier, link, _, _ = _made(SECONDS_MAX)
    link.job = JobState(1, 2, store_url="/run", chunk_bytes=4096, attempt=1 if lives else None)
    said: list[str] = []
    staging = SlowStaging()
    ((staging.storage, _),) = copier.gate.update_order().items()
    tier_write = TierWrite((1, 3), (), SaveRecord(), {0: cast(Any, None)}, compare=said.append)
    transfer = Transfer(3, SaveRecord(save_seconds=0.5))
    taken = Capture([], {}, None, (), [], ())
    copier.close_gate()
    fingerprints = cast(Fingerprints, FakeFingerprints())
    copier.copy(
        CopyJob(
            transfer, cast(Staging, staging), cast(Router, staging), taken, None, fingerprints, tier_write
        )
    )
    staging.go.set()
    assert not copier.wait()
    assert said == ([] if lives else ["AAAAAA=="])
    copier.close()
