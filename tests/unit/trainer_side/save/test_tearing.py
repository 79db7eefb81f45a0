"""Any change of the state at any time: a copy equals the saved instant bit for bit, or the step is withdrawn.

The copy is slow, so that changes right after `save()` could enter it. Without detection, and without the wait of a save
whose hooks are not proven, the same trainings give torn copies: the tests show that, too.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config import TrainerConfig
from holdfast.wire.doubt import Doubt
from tests.support import changes
from tests.support.changes import (
    FEW_BYTES,
    PACKAGES,
    SHARDED_TEARING,
    SHARDED_WAITING,
    TEARING,
    WAITING,
    Training,
)
from tests.unit.trainer_side.assemble import make_plan, taken
from tests.unit.trainer_side.test_checkpointer import SECONDS_MAX, FakeLink
from trainer_side import joining
from trainer_side.checkpointer import Checkpointer
from trainer_side.save.copy_plan import SlicePlan
from trainer_side.save.hook_coverage import CopyPolicy
from trainer_side.save.staging import CopyEngine
from trainer_side.save.tearing import DeviceWords, SavedInstant, TearCheck
from trainer_side.state.split_tensor import local_of
from trainer_side.state.tree import collect, tensor_paths
from trainer_side.transfer import TransferState

SAVES = 6
BATCH_SECONDS = 0.002
TRACELESS = (changes.AverageThroughData, changes.AverageBesideTorch, changes.ShardedAverage)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> FakeLink:
    found = FakeLink()
    monkeypatch.setattr(joining, "connect_stager", found.meet)
    changes.copy_slowly(BATCH_SECONDS, monkeypatch.setattr)
    return found


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For DTensors."""
    file = tmp_path_factory.mktemp("gloo") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Run:
    """One training with a checkpointer, and the outcome of each save."""

    def __init__(self, link: FakeLink, kind: type[Training]) -> None:
        self.link, self.training = link, kind()
        self.training.step(-1)  # the state of the optimizer is there
        self.checkpointer = Checkpointer(
            self.training.state, config=TrainerConfig(in_flight_max=2, on_not_durable="warn")
        )
        if kind is changes.PatientAverage:
            self.training.waits = self.checkpointer.wait_copied
        if kind is changes.AverageInContext:
            self.training.changing = self.checkpointer.changing
        self.torn: list[int] = []  # saves whose copy mixes instants
        self.waited: list[bool] = []  # whether save() came back with its copy done

    def go_on(self, saves: int) -> Run:
        for step in range(len(self.waited), len(self.waited) + saves):
            wanted = self._tensors()
            assert self.checkpointer.save(step)
            self.waited.append(not self.checkpointer._copier.gate.closed)
            self.training.saved(step)
            self.training.step(step)  # the next update, which comes while this save is copied
            self._judge(step, wanted)
        return self

    def _tensors(self) -> dict[str, bytes]:
        found = tensor_paths(collect(self.training.state))
        return {named.path: local_of(named.tensor).detach().numpy().tobytes() for named in found}

    def _judge(self, step: int, wanted: dict[str, bytes]) -> None:
        transfer, area = self.link.offers[step]
        deadline = time.monotonic() + SECONDS_MAX
        while self.checkpointer._copier._job is not None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        if all(area.is_ready(offset) for offset in area._frame_at):
            if self._got(area) != wanted:
                self.torn.append(step)
            self.link.stage(step)
        else:
            assert step in self.link.declined, f"step {step} is neither whole nor withdrawn"
            transfer.set_state(
                TransferState.DECLINED, self.link.declined[step]
            )  # as the stager tells all ranks

    def _got(self, area: Any) -> dict[str, bytes]:
        layout = self.link.layouts[-1]
        found = {entry: bytearray(whole.nbytes) for entry, whole in enumerate(layout.entries)}
        for piece in SlicePlan.of(layout, 0, [False] * len(layout.entries)).now:
            view = area.view(piece.offset, piece.nbytes)
            found[piece.entry][piece.entry_offset : piece.entry_offset + piece.nbytes] = view
        return {tensor.path: bytes(found[tensor.entry]) for tensor in layout.tensors}

    def end(self) -> None:
        self.checkpointer.close()


@pytest.fixture
def runs(link: FakeLink) -> Iterator[Any]:
    made: list[Run] = []

    def run(kind: type[Training], saves: int = SAVES) -> Run:
        made.append(Run(link, kind))
        return made[-1].go_on(saves)

    yield run
    for one in made:
        one.end()


@pytest.mark.parametrize("kind", WAITING + SHARDED_WAITING)
def test_a_state_that_waits_is_saved_each_time(runs: Any, link: FakeLink, kind: type[Training]) -> None:
    run = runs(kind)
    assert not run.torn
    assert not link.declined


@pytest.mark.parametrize("kind", WAITING[:5] + SHARDED_WAITING)
def test_a_state_that_waits_at_the_gate_is_proven_and_copied_behind_it(
    runs: Any, kind: type[Training]
) -> None:
    """The first save finishes its copy, since nothing is shown yet; later ones leave it behind the gate."""
    waited = runs(kind).waited
    assert waited[0]
    assert not any(waited[2:])


@pytest.mark.parametrize("kind", TEARING + SHARDED_TEARING)
def test_a_tearing_state_is_withdrawn_by_name_or_waited_for(
    runs: Any, link: FakeLink, kind: type[Training], caplog: pytest.LogCaptureFixture
) -> None:
    run = runs(kind)
    assert not run.torn
    assert all(reason.cause == "torn" for reason in link.declined.values())
    # What is put back uncounted before the next update leaves no trace but a torn copy: one is withdrawn, then.
    assert run.waited.count(False) == len(link.declined) <= (kind in TRACELESS)
    warnings = [
        line for line in caplog.messages if "From now on save() returns only when its copy is done" in line
    ]
    assert len(warnings) == 1


@pytest.mark.parametrize("kind", FEW_BYTES)
def test_a_few_uncounted_bytes_are_found_by_the_first_comparison(
    runs: Any, link: FakeLink, kind: type[Training], caplog: pytest.LogCaptureFixture
) -> None:
    """The copy of the first save is done before they change. From then on every save waits, so none is torn."""
    run = runs(kind)
    assert not run.torn
    assert not link.declined
    assert all(run.waited)
    (doubt,) = link.doubts
    assert doubt.steps is None, "nothing was copied behind the gate before"
    assert re.match(r"(model/\d+|optimizer/state/\d+/exp_avg) was changed after save\(0\)", doubt.reason)
    assert sum("on all ranks" in line for line in caplog.messages) == 1
    assert run.checkpointer.stats.compared == 1


def test_a_few_uncounted_bytes_beside_an_optimizer_without_hooks(runs: Any, link: FakeLink) -> None:
    """No hook is called, so the next save looks; what torch has counted is the optimizer's, and needs no hook."""
    run = runs(changes.UnhookedRows)
    assert not run.torn
    assert all(run.waited)
    assert not link.doubts, "each tensor was changed by the optimizer as well, which torch has counted"


@pytest.mark.parametrize("kind", FEW_BYTES[:5])
def test_without_the_comparison_a_few_bytes_tear_copies(
    runs: Any, kind: type[Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests with these trainings can fail."""
    changes.never_compare(monkeypatch.setattr)
    assert runs(kind, 8).torn


def test_copies_behind_the_gate_before_a_failed_comparison_are_doubtful(
    runs: Any, link: FakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that begins to change a few bytes later: the next comparison sees it, and names what may be torn."""
    monkeypatch.setattr(CopyPolicy, "is_sampled", {3, 10}.__contains__)
    monkeypatch.setattr(changes.RowsThroughData, "begins", 5)
    run = runs(changes.RowsThroughData, 14)
    assert run.waited == [step in {0, 3, *range(10, 14)} for step in range(14)]
    (doubt,) = link.doubts
    assert doubt.steps == (4, 9), "the comparison after save(3) was good, that after save(10) was not"
    assert run.torn, "without a torn one nothing is shown"
    assert all(map(doubt.covers, run.torn))
    stats = run.checkpointer.stats
    assert stats.compared == 3
    assert stats.compare_seconds > 0


def test_a_doubt_of_another_rank_ends_the_trust_here(
    runs: Any, link: FakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CopyPolicy, "is_sampled", frozenset[int]().__contains__)
    run = runs(Training, 4)
    assert run.waited == [True, False, False, False]
    link.inbox.on_doubt(Doubt(1, (2, 3), "model/9 was changed after save(3)"))
    run.go_on(3)
    assert run.waited[4:] == [True] * 3
    (mine,) = link.doubts
    assert mine == Doubt(0, (1, 3), "model/9 was changed after save(3)")
    link.inbox.on_doubt(mine)  # as the stager tells all
    assert link.doubts == [mine], "it is said once"


@pytest.mark.parametrize("kind", [Training, *FEW_BYTES])
def test_a_copy_inside_needs_no_gate_and_no_proof(
    runs: Any, link: FakeLink, kind: type[Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_COPY", "inside")
    run = runs(kind)
    assert all(run.waited)
    assert not run.torn
    assert not link.declined
    assert not link.doubts
    assert run.checkpointer.stats.compared == 0


@pytest.mark.parametrize("kind", [Training, *FEW_BYTES])
def test_a_quick_copy_is_made_inside_save(
    runs: Any, link: FakeLink, kind: type[Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is measured: here a copy takes some tens of milliseconds."""
    monkeypatch.setenv("HOLDFAST_COPY_INSIDE_MS_MAX", "60000")
    run = runs(kind)
    assert all(run.waited)
    assert not run.torn
    assert not link.doubts
    assert run.checkpointer.stats.compared == 0


def test_bytes_between_tensors_are_nobodys(link: FakeLink) -> None:
    """In a storage with a gap only the bytes of tensors are compared."""
    flat = torch.zeros(64)
    first, second = (torch.nn.Parameter(part) for part in (flat[:20], flat[30:64:2]))
    model = torch.nn.ParameterList([first, second])
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0)}
    skeleton = make_plan(state)
    pieces = SlicePlan.of(skeleton.layout, 0, skeleton.gated)
    instant = TearCheck(skeleton.layout, pieces, skeleton.gated, {}).capture_instant(
        taken(state, skeleton), 1
    )
    assert instant is not None
    (piece,) = pieces.gated
    area = torch.zeros(pieces.area_bytes, dtype=torch.uint8)
    assert piece.nbytes == 63 * 4
    for place in (*range(20, 30), *range(31, 64, 2)):
        flat.numpy()[place] = 1.0
        assert not instant.find_uncounted_change(area)
    for place in (0, 19, 30, 62):
        flat.numpy()[place] = 1.0
        assert instant.find_uncounted_change(area) in {"model/0", "model/1"}
        flat.numpy()[place] = 0.0


@pytest.mark.parametrize("kind", TEARING + SHARDED_TEARING)
def test_a_copy_torn_after_it_was_proven_is_detected(
    runs: Any, link: FakeLink, kind: type[Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every copy is left behind the gate: detection alone stands between a torn copy and the store."""
    changes.trust_everything(monkeypatch.setattr)
    run = runs(kind)
    assert not run.torn
    assert link.declined
    for step, found in link.declined.items():
        reason = str(found)
        assert reason.startswith(("torn: model/", "torn: optimizer/")), reason
        assert f"was changed after save({step})" in reason
        assert "wait_copied()" in reason
    stats = run.checkpointer.stats
    assert stats.failed == stats.causes["torn"] == len(link.declined)


@pytest.mark.parametrize("kind", TEARING + SHARDED_TEARING)
def test_without_detection_copies_are_torn(
    runs: Any, kind: type[Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail."""
    changes.see_nothing(monkeypatch.setattr)
    assert runs(kind).torn


def test_changes_of_a_dtensor_are_looked_for_where_torch_counts_them(link: FakeLink) -> None:
    """In the DTensor, not in the tensor inside it; and what is not counted, some words tell."""
    run = Run(link, changes.Sharded).go_on(1)
    planner, parameter = run.checkpointer._saver._planner, run.training.parameters[3]
    moment = run.training.optimizer.state[parameter]["exp_avg"]

    def seen(change: Callable[[], object]) -> str:
        plan, taken_now = planner.capture()
        instant = plan.tear_check.capture_instant(taken_now, 1)
        assert instant is not None
        assert not instant.find_changed()
        with torch.no_grad():
            change()
        return instant.find_changed()

    local = local_of(parameter)
    before = parameter._version, local._version
    assert seen(lambda: parameter.add_(0.0)) == "model/3", "not one word is another"
    assert (parameter._version, local._version) == (before[0] + 1, before[1])
    assert seen(lambda: moment.to_local().add_(0.0)) == "optimizer/state/3/exp_avg"
    assert not seen(lambda: torch._foreach_add_([parameter], 0.0)), (
        "torch counts it: the words are not needed"
    )
    assert seen(lambda: torch._foreach_add_([parameter], 1.0)) == "model/3"
    run.end()


@pytest.mark.parametrize("package", PACKAGES)
def test_optimizers_of_others(runs: Any, link: FakeLink, package: str) -> None:
    pytest.importorskip(package.partition(":")[0])
    run = runs(PACKAGES[package])
    assert not run.torn
    assert all(reason.cause == "torn" for reason in link.declined.values())


def test_words_on_a_device_are_compared_with_the_copy() -> None:
    """On a device that torch knows; what CUDA adds is a stream (tests/gpu)."""
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(size)) for size in (1, 1000, 5))
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    skeleton = make_plan(state)
    pieces = SlicePlan.of(skeleton.layout, 0, skeleton.gated)
    check = TearCheck(skeleton.layout, pieces, skeleton.gated, {})
    captured = taken(state, skeleton)
    assert check.capture_instant(captured, 1) is not None
    sources = [captured.sources[piece.entry] for piece in check.pieces]
    within = np.array([[0, piece.nbytes - min(8, piece.nbytes)] for piece in check.pieces])
    places = range(len(check.pieces))
    words = DeviceWords(places, check, [source for source in sources if source is not None], within)
    area = torch.zeros(pieces.area_bytes, dtype=torch.uint8)
    for piece, source in zip(check.pieces, sources, strict=True):
        assert source is not None
        part = source.bytes()[piece.entry_offset : piece.entry_offset + piece.nbytes]
        area[piece.offset : piece.offset + piece.nbytes] = part
    assert words.find_wrong(places, area) is None
    for place in places:
        last = check.pieces[place].offset + check.pieces[place].nbytes - 1
        area[last] ^= 255
        found = words.find_wrong(places, area)
        assert found == (place if check.pieces[place].nbytes >= 8 else None)
        area[last] ^= 255


def test_a_training_that_stops_tearing_is_trusted_again(runs: Any) -> None:
    run = runs(changes.Best, 3)
    run.training.saved = lambda _step: None
    run.go_on(20)
    assert all(run.waited[:16])
    assert not any(run.waited[-3:])


def test_no_tensor_is_kept_beyond_the_first_update(runs: Any) -> None:
    def alive() -> list[SavedInstant]:
        gc.collect()
        return [one for one in gc.get_objects() if type(one) is SavedInstant]

    before = alive()  # of other tests, whose failures or threads may hold theirs
    runs(Training, 3)
    assert all(any(one is earlier for earlier in before) for one in alive())


def test_a_step_whose_tensor_another_thread_changes_inside_save_is_withdrawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A buffer is copied in `save()`, where no gate is needed: no other code of the training thread can run."""
    link = FakeLink()
    monkeypatch.setattr(joining, "connect_stager", link.meet)
    model = torch.nn.BatchNorm1d(8)
    config = TrainerConfig(events=None, on_not_durable="warn", close_seconds_max=0.1)
    copy_host, changes = CopyEngine.copy_host, [True, False]

    def change_and_copy(*args: Any) -> None:
        if changes.pop():
            model.get_buffer("running_mean").add_(1)
        copy_host(*args)

    with Checkpointer({"model": model}, config=config) as checkpointer:
        monkeypatch.setattr(CopyEngine, "copy_host", staticmethod(change_and_copy))
        checkpointer.save(0)
        link.bytes_of(0)
        assert 0 not in link.declined
        link.stage(0)
        checkpointer.save(1)
        assert "model/running_mean was changed after save(1)" in link.declined[1].text
