"""A process started in a control group has its limits; the group is gone afterwards."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.control_group import ControlGroup, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there are control groups")


def test_a_command_runs_inside_with_the_limits_and_its_own_arguments() -> None:
    with ControlGroup() as group:
        group.allow(cpus=0.5, memory_bytes=64 << 20)
        folders = [Path(word) for word in group.inside if word.startswith("/sys/fs/cgroup")]
        done = subprocess.run(
            [*group.inside, "sh", "-c", 'cat /proc/self/cgroup; echo "$@"', "sh", "--", "a b"],
            capture_output=True,
            text=True,
            check=True,
        )
        found = {line.split(":")[1]: line.split(":")[2] for line in done.stdout.splitlines() if "/" in line}
        for folder, controller in zip(folders, ("cpu", "memory"), strict=True):
            assert found[controller].endswith(folder.name)
        assert done.stdout.endswith("-- a b\n")
        assert (folders[0] / "cpu.cfs_quota_us").read_text() == "50000\n"
        assert (folders[1] / "memory.limit_in_bytes").read_text() == f"{64 << 20}\n"
        assert group.most_bytes > 0
    assert not any(folder.exists() for folder in folders)
