"""Priority is only lowered, once; a wait accepts any descriptor; memory respects limits."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.process import available_memory_bytes, count_oom_kills, wait_readable

_TWICE = (
    "import os; from holdfast.process import yield_to_training as y; {}; y(5); y(10); y(5); print(os.nice(0))"
)


def _niceness(before: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _TWICE.format(before)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_a_process_yields_once_and_one_that_is_nicer_already_stays_so() -> None:
    ours = os.nice(0)  # of whoever started the tests
    assert _niceness("pass") == max(10, ours)
    assert _niceness(f"os.nice({15 - min(ours, 15)})") == max(15, ours)


_IN_THREADS = """
import os, threading
from holdfast.process import yield_to_training
go, read, found = threading.Event(), threading.Barrier(3), []
def work():
    go.wait()
    found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    read.wait()
for _ in range(2):
    threading.Thread(target=work).start()
yield_to_training(11)
go.set()
read.wait()
print(*found)
"""


def test_threads_that_run_already_yield_as_well() -> None:
    done = subprocess.run([sys.executable, "-c", _IN_THREADS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(max(11, os.nice(0)))] * 2


_SCRIPT = """
import atexit, threading
from holdfast.process import call_or_exit
call = {call}
atexit.register(lambda: call_or_exit({seconds}, call, "MPI_Finalize"))
print("worked")
"""


def _run(call: str, seconds: float) -> subprocess.CompletedProcess[str]:
    script = _SCRIPT.format(call=call, seconds=seconds)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_last_call_that_hangs_is_left_and_named() -> None:
    done = _run("threading.Event().wait", 0.2)
    assert (done.returncode, done.stdout) == (0, "worked\n")
    assert "MPI_Finalize did not return within 0.2 s" in done.stderr


def test_a_function_that_returns_ends_the_process_as_ever() -> None:
    done = _run("lambda: print('over')", 50.0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "worked\nover\n", "")


def test_a_descriptor_may_have_any_number() -> None:
    """`select` takes none above 1023."""
    reader, writer = os.pipe()
    high = fcntl.fcntl(reader, fcntl.F_DUPFD_CLOEXEC, 2000)
    try:
        begun = time.monotonic()
        wait_readable([high], 0.01)
        assert time.monotonic() - begun >= 0.005, "nothing has come"
        os.write(writer, b"x")
        wait_readable([high], None)
    finally:
        for descriptor in (reader, writer, high):
            os.close(descriptor)


_VERSION_2 = ("0::/jobs/one\n", "", "memory.max", "memory.current", "inactive_file")
_VERSION_1 = (
    "11:cpu,cpuacct:/elsewhere\n4:memory:/jobs/one\n0::/jobs/one\n",
    "memory",
    *("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_NO_LIMIT_1 = "9223372036854771712"


@pytest.mark.parametrize("mounted", [True, False], ids=["whole tree", "own group as the root"])
@pytest.mark.parametrize(
    ("version", "group_max", "parent_max", "expected"),
    [
        (_VERSION_2, "max", "max", 4 << 30),
        (_VERSION_2, "3221225472", "max", 2560 << 20),
        (_VERSION_2, "max", "1048576000", (1048576000 - (512 << 20))),
        (_VERSION_1, _NO_LIMIT_1, _NO_LIMIT_1, 4 << 30),
        (_VERSION_1, "3221225472", _NO_LIMIT_1, 2560 << 20),
        (_VERSION_1, _NO_LIMIT_1, "1048576000", (1048576000 - (512 << 20))),
    ],
)
def test_the_memory_that_is_left_is_that_of_the_machine_and_of_each_group(
    tmp_path: Path, version: tuple[str, ...], group_max: str, parent_max: str, expected: int, mounted: bool
) -> None:
    groups, controller, limit, usage, cached = version
    top = tmp_path / "sys/fs/cgroup" / controller
    parent = top / "jobs" if mounted else top  # in a container its own group is mounted as the root
    group = parent / "one"
    (tmp_path / "proc/self").mkdir(parents=True)
    group.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemFree: 1 kB\nMemAvailable: 4194304 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(groups if mounted else groups.replace("/jobs/one", "/one"))
    for folder, limited in ((group, group_max), (parent, parent_max)):
        (folder / limit).write_text(f"{limited}\n")
        (folder / usage).write_text(f"{768 << 20}\n")
        (folder / "memory.stat").write_text(f"anon 1\n{cached} {256 << 20}\n")
    assert available_memory_bytes(tmp_path) == expected


_EVENTS = "low 0\nhigh 7\nmax 8\noom 5\noom_kill {}\noom_group_kill 0\n"
_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
_OLD_CONTROL = "oom_kill_disable 0\nunder_oom 0\n"  # of kernels before 4.13


@pytest.mark.parametrize(
    ("groups", "files", "killed"),
    [
        ("0::/jobs/one\n", {"jobs/one/memory.events": _EVENTS}, 3),
        ("0::/jobs/one\n", {"memory.events": _EVENTS}, 3),  # in a container its own group is the root
        ("0::/jobs/one\n", {"jobs/memory.events": _EVENTS}, 3),  # no controller of its own
        ("5:cpu:/x\n4:memory:/jobs/one\n0::/\n", {"memory/jobs/one/memory.oom_control": _CONTROL}, 3),
        ("4:hugetlb,memory:/jobs/one\n0::/\n", {"memory/memory.oom_control": _CONTROL}, 3),
        ("4:memory:/jobs/one\n", {"memory/jobs/one/memory.oom_control": _OLD_CONTROL}, 20),
        ("0::/\n", {}, 20),  # no group counts: the whole machine does
        ("", {}, 20),
    ],
)
def test_kills_for_memory_are_those_of_the_group_that_counts_them(
    tmp_path: Path, groups: str, files: dict[str, str], killed: int
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    (tmp_path / "proc/vmstat").write_text("oom_kill_unrelated 9\noom_kill 20\n")
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.format(3))
    assert count_oom_kills(tmp_path) == killed


def test_where_nobody_counts_kills_for_memory_there_are_none(tmp_path: Path) -> None:
    assert count_oom_kills(tmp_path) == 0


def test_the_memory_of_this_machine_is_some() -> None:
    assert 0 < available_memory_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
