"""`holdfast doctor`: each fault of machine or store gives a finding with a fix, and leaves no files."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from holdfast.command.checks import CheckPlan, CheckState, Finding
from holdfast.errors import StoreError
from holdfast.ring.journal import Header
from holdfast.ring.ring import Ring
from operator_side import doctor
from operator_side.doctor import examine, machine
from operator_side.doctor.store_checks import examine_store
from tests.support.memory_store import MemoryStore

MIB = 1 << 20


def plan_for(tmp_path: Path, *, store: str | None = None, ring_bytes: int = 16 * MIB) -> CheckPlan:
    return CheckPlan(store, tmp_path / "runtime", ring_bytes, MIB)


def by_check(findings: Any) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


# -- the machine --------------------------------------------------------------------------------------------


def test_a_ring_on_a_disk_is_worth_a_warning(tmp_path: Path) -> None:
    found = by_check(machine.shared_memory(plan_for(tmp_path)))["ring directory"]
    assert found.state is CheckState.WARN
    assert "/dev/shm" in found.fix
    assert not list((tmp_path / "runtime").iterdir())


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"cannot mount a small tmpfs: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_too_little_shared_memory_is_named_with_both_figures(small_memory: Path) -> None:
    found = by_check(machine.shared_memory(CheckPlan(None, small_memory / "runtime", 64 * MIB, MIB)))
    assert found["ring directory"].state is CheckState.OK
    assert found["ring room"].state is CheckState.FAIL
    assert "8 MiB are free" in found["ring room"].seen
    assert "80 MiB" in found["ring room"].seen
    assert "--shm-size" in found["ring room"].fix
    assert found["ring memory"].state is CheckState.FAIL, "64 MiB cannot be touched in 8"


def test_a_ring_whose_size_is_not_set_is_told_how_large_it_may_become(
    small_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_size = CheckPlan(None, small_memory / "runtime", 2 * MIB, MIB // 8)
    assert "ring growth" not in by_check(machine.shared_memory(set_size))
    grows = CheckPlan(None, small_memory / "runtime", 2 * MIB, MIB // 8, ring_grows=True)
    seen = by_check(machine.shared_memory(grows))["ring growth"].seen
    assert "two checkpoints of 2 MiB each" in seen, "2 MiB and half of 8, less 8 chunks, in halves"
    monkeypatch.setattr("holdfast.ring.growth.available_memory_bytes", lambda: 0)
    seen = by_check(machine.shared_memory(grows))["ring growth"].seen
    assert "two checkpoints of 0 MiB each" in seen


def test_a_runtime_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "runtime"
    base.mkdir()
    base.chmod(0o777)
    found = by_check(machine.shared_memory(plan_for(tmp_path)))["ring directory"]
    assert found.state is CheckState.FAIL
    assert "mode 0777" in found.seen


def test_the_ring_of_a_dead_flusher_is_told_and_not_touched(tmp_path: Path) -> None:
    directory = tmp_path / "runtime" / "0123456789abcdef"
    header = Header(4096, 8, 1)
    Ring.create(directory, chunk_bytes=header.chunk_bytes, ring_chunks=header.ring_chunks, attempt=1).close()
    before = sorted(path.name for path in directory.iterdir())
    found = by_check(machine.shared_memory(plan_for(tmp_path)))["left ring"]
    assert found.state is CheckState.WARN
    assert str(directory) in found.seen
    assert "holdfast flusher" in found.fix
    assert sorted(path.name for path in directory.iterdir()) == before


def test_a_clock_that_is_set_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_check(machine.clock(plan_for(tmp_path)))["clock"].state is CheckState.OK
    slept: list[float] = []
    monkeypatch.setattr("operator_side.doctor.machine.time.sleep", slept.append)
    monkeypatch.setattr("operator_side.doctor.machine.time.time", lambda: 1000.0 + 7.0 * len(slept))
    assert by_check(machine.clock(plan_for(tmp_path)))["clock"].state is CheckState.WARN


def test_a_busy_machine_is_not_a_clock_that_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process stands still for a moment between the two clocks, and not at every look."""
    now, looks = [1000.0], itertools.count()

    def wall() -> float:
        seen = now[0]
        now[0] += 0.5 if next(looks) % 3 == 0 else 0.0
        return seen

    monkeypatch.setattr("operator_side.doctor.machine.time.sleep", lambda seconds: None)
    monkeypatch.setattr("operator_side.doctor.machine.time.monotonic", lambda: now[0])
    monkeypatch.setattr("operator_side.doctor.machine.time.time", wall)
    assert by_check(machine.clock(plan_for(tmp_path)))["clock"].state is CheckState.OK


# -- the store ----------------------------------------------------------------------------------------------


def test_a_directory_is_tried_in_every_way_and_left_as_it_was(tmp_path: Path) -> None:
    store = tmp_path / "new" / "run"
    found = by_check(examine_store(plan_for(tmp_path, store=str(store))))
    assert {finding.state for finding in found.values()} <= {CheckState.OK, CheckState.WARN}
    assert {"store", "store abort", "store parts", "store exclusive", "store direct", "store sync"} <= set(
        found
    )
    assert not store.exists()


def test_a_run_that_is_there_keeps_everything(tmp_path: Path) -> None:
    store = tmp_path / "run"
    (store / ".holdfast" / "tmp").mkdir(parents=True)
    (store / "slices").mkdir()
    (store / "slices" / "step-000000004-a001-r00000of00001.slice").write_bytes(b"of an older holdfast")
    (store / "step-000000001.pt").write_bytes(b"x")
    (store / ".holdfast" / "tmp" / "of-a-job-that-runs").write_bytes(b"y")
    before = sorted(store.rglob("*"))
    found = by_check(examine_store(plan_for(tmp_path, store=str(store))))
    assert sorted(store.rglob("*")) == before
    assert found["store slices"].state is CheckState.WARN
    assert "1 step only as slices written by an older holdfast" in found["store slices"].seen


class Faulty(MemoryStore):
    """A store with one given fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault

    def create(self, name: str, data: bytes) -> bool:
        if self._fault == "create":
            self.write(name, data)
            return True
        return super().create(name, data)

    def delete(self, name: str) -> None:
        if self._fault == "delete":
            raise StoreError(f"memory: not allowed to delete {name}")
        super().delete(name)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        super().read_into(name, offset, buffer)
        if self._fault == "bytes":
            buffer[0] ^= 1


@pytest.mark.parametrize(
    ("fault", "check", "state", "words"),
    [
        ("create", "store exclusive", CheckState.WARN, "created again"),
        ("delete", "store", CheckState.FAIL, "not allowed to delete"),
        ("bytes", "store", CheckState.FAIL, "other bytes"),
    ],
)
def test_a_fault_of_the_store_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, check: str, state: CheckState, words: str
) -> None:
    store = Faulty(fault)
    monkeypatch.setattr("operator_side.doctor.store_checks.open_store", lambda _: store)
    found = list(examine_store(plan_for(tmp_path, store="memory://run")))
    last = [finding for finding in found if finding.check == check][-1]
    assert last.state is state
    assert words in last.seen
    if fault != "delete":
        assert store.list() == []


def test_a_read_only_directory(tmp_path: Path) -> None:
    found = by_check(examine_store(plan_for(tmp_path, store="/proc/run")))
    assert found["store"].state is CheckState.FAIL
    assert "/proc/run" in found["store"].seen


# -- all together -------------------------------------------------------------------------------------------


def test_a_check_that_breaks_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: CheckPlan) -> Iterator[Finding]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def good(_: CheckPlan) -> Iterator[Finding]:
        yield Finding("good", CheckState.OK, "seen")

    monkeypatch.setattr(doctor, "_checks", lambda: iter([broken, good]))
    found = by_check(examine(plan_for(tmp_path)))
    assert found["broken"].state is CheckState.FAIL
    assert "Input/output error" in found["broken"].seen
    assert found["good"].state is CheckState.OK


def test_a_role_that_is_not_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("trainer", "no_such_module:check", "holdfast.checks")
    monkeypatch.setattr(
        doctor, "entry_points", lambda *, group: [point] if group == "holdfast.checks" else []
    )
    found = by_check(examine(plan_for(tmp_path)))["trainer"]
    assert found.state is CheckState.SKIPPED
    assert "pip install 'torch>=" in found.fix


def test_figures_of_disk_and_memory_are_those_of_the_machine(tmp_path: Path) -> None:
    found = by_check(examine_store(plan_for(tmp_path, store=str(tmp_path / "run"))))["store room"]
    free_mib = shutil.disk_usage(tmp_path).free / MIB
    said = float(found.seen.split(" ")[0].replace(",", ""))
    assert said == pytest.approx(free_mib, rel=0.2)
