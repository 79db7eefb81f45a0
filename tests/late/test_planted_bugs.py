"""Each missing wait that is planted in the copy from a device tears a copy under some policy; without, none is torn."""

from __future__ import annotations
import __future__

import inspect
from collections.abc import Collection

import pytest
import torch

from tests.gpu.test_staging import PLENTY, OnDevice
from tests.late.control import LateMachine
from trainer_side.save.device_copy import DeviceCopy
from trainer_side.save.device_lane import AcceleratorLane

pytestmark = pytest.mark.late("eager")  # each test goes through its own
POLICIES = ("lazy", "side_lazy", "dice:1", "dice:2", "eager")
# Strategy C; a mirror of what anything may change, from the second save on; a mirror of all.
LIMITS = {"behind the gate": 0, "part": 1 << 20, "mirror": PLENTY}
_VALUES = 199
_AFTER, _LATER = 200, 201  # no tensor is filled with these before a save

_ARRIVES = "            queued.event.synchronize()\n"
_READ = "            read(queued.batch)\n"
_SCATTERED = (
    "            if queued.bounce is not None:\n                _scatter(queued.batch, queued.bounce, area)\n"
)

# As on XPU, where none can be taken beside it.
TORCHS_MEMORY = "if self._beside_torch is None:", "if True:"

# Of which class, and what is planted in the place of what.
BUGS: dict[str, tuple[type, list[tuple[str, str]]]] = {
    "a copy does not wait for what was queued before save()": (
        AcceleratorLane,
        [("self._stream.wait_event(after)", "pass"), ("self._stream.wait_event(self.record())", "pass")],
    ),
    "a batch is not waited for": (DeviceCopy, [(_ARRIVES, "")]),
    "the gate opens before a batch is read": (DeviceCopy, [(_ARRIVES + _READ, _READ + _ARRIVES)]),
    "small tensors are scattered before they arrive": (
        DeviceCopy,
        [(_ARRIVES + _READ + _SCATTERED, _SCATTERED + _ARRIVES + _READ)],
    ),
    "a slot is used again before it is empty": (DeviceCopy, [("area, number % _SLOTS)", "area, 0)")]),
    "what is captured in save() is not waited for": (
        DeviceCopy,
        [("            event.synchronize()\n            for batch,", "            for batch,")],
    ),
    "a mirror counts as complete before it is": (
        DeviceCopy,
        [
            (
                "            sections = self._sections(batches, nbytes)\n",
                "            sections = self._sections(batches, nbytes)\n            self._lane.go_on()\n",
            ),
            ("self._lane.go_on()  # whatever", "pass  # whatever"),
        ],
    ),
    "a mirror is written before its memory is there": (
        AcceleratorLane,
        [("self._module.current_stream(self._device).wait_event(there)", "pass")],
    ),
    "the memory of a mirror is given back before it is read": (
        AcceleratorLane,
        [("runtime.free, address, stream)", "runtime.free, address, 0)")],
    ),
    "a mirror in torch's memory is given away before it is read": (
        AcceleratorLane,
        [TORCHS_MEMORY, ("memory.record_stream(self._stream)", "pass")],
    ),
}


def plant(of: type, pieces: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the class has other lines."""
    source = inspect.getsource(of)
    for right, wrong in pieces:
        assert source.count(right) == 1, f"the source has changed: {right!r}"
        source = source.replace(right, wrong)
    module = inspect.getmodule(of)
    names = {**vars(module)}
    exec(compile(source, of.__name__, "exec", flags=__future__.annotations.compiler_flag), names)
    for name, function in vars(names[of.__name__]).items():
        if inspect.isfunction(function):
            monkeypatch.setattr(of, name, function)


class Scene:
    """Saves of a model on the device whose bytes are known; what is free is overwritten at once."""

    def __init__(self, late: LateMachine, limit: int) -> None:
        self._late = late
        self._job = OnDevice(limit)
        self._sources = {
            number: source
            for number, source in enumerate(self._job.taken.sources)
            if source is not None and source.device.type == "cuda"
        }
        self._at = {source.storage.data_ptr(): number for number, source in self._sources.items()}

    def save(self, base: int) -> list[str]:
        """The names of the entries that are torn; `base` tells this save from those before."""
        job, sources = self._job, self._job.taken.sources
        torch.cuda.empty_cache()  # what is given back is asked of the device then
        for number in self._sources:
            self._fill(number, (base + 1) % _VALUES)
        torch.cuda.synchronize()
        for number in self._sources:
            self._fill(number, (base + number) % _VALUES)  # still queued when save() comes
        route = job.router.route(sources, dict, order_changed=True)
        is_mirrored = job.staging.copy_now(sources, job.taken.contents, route)
        after = torch.cuda.current_stream().record_event()
        if is_mirrored:
            for number in self._sources:
                self._fill(number, _AFTER)

        def passed(storages: Collection[int]) -> None:
            with torch.cuda.stream(torch.cuda.default_stream()):
                for storage in storages:
                    if storage in self._at:
                        self._fill(self._at[storage], _AFTER)

        taken = self._taken_bytes()
        held: list[torch.Tensor] = []

        def cancelled() -> bool:
            # What a mirror gives back, the training takes at once, and writes to it.
            given_back = taken - self._taken_bytes()
            if given_back > 0:
                with torch.cuda.stream(torch.cuda.default_stream()):
                    held.append(torch.empty(given_back, dtype=torch.uint8, device="cuda").fill_(_LATER))
            return False

        live = job.staging.live(route)
        job.staging.copy_gated(
            sources, route, after=after, cancelled=cancelled, passed=passed, copied=lambda: None
        )
        assert live.storages or is_mirrored
        # What a sender would read now, before anybody waits for anything else.
        entries = job.skeleton.layout.entries
        torn = []
        for number in self._sources:
            entry, wanted = entries[number], (base + number) % _VALUES
            if bytes(job.staging.view(entry.offset, entry.nbytes)) != bytes([wanted]) * entry.nbytes:
                torn.append(entry.name)
        return torn

    def _taken_bytes(self) -> int:
        """Of the device, without what torch keeps and does not use."""
        return self._late.device_bytes() - torch.cuda.memory_reserved() + torch.cuda.memory_allocated()

    def _fill(self, number: int, value: int) -> None:
        self._sources[number].bytes().fill_(value)


def _torn(late: LateMachine, limit: int, policy: str) -> list[str]:
    late.policy("eager")
    scene = Scene(late, limit)
    late.policy(policy)
    found = [name for base in (3, 60) for name in scene.save(base)]
    late.policy("eager")
    torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_bug_no_copy_is_torn(policy: str, limit: str, late: LateMachine) -> None:
    assert _torn(late, LIMITS[limit], policy) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_a_mirror_in_torchs_memory_is_not_torn_either(
    policy: str, late: LateMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(AcceleratorLane, [TORCHS_MEMORY], monkeypatch)
    before = late.count("cudaMallocAsync")
    assert _torn(late, PLENTY, policy) == []
    assert late.count("cudaMallocAsync") == before


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_tears_a_copy(bug: str, late: LateMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(*BUGS[bug], monkeypatch)
    assert any(_torn(late, limit, policy) for limit in LIMITS.values() for policy in POLICIES)
    late.violations()
