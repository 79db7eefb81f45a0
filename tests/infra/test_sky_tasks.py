"""The command lines of infra/skypilot as processes: a rank is killed, and the task runs again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from holdfast.checkpoints.catalog import Catalog
from holdfast.store import open_store
from operator_side.supervise.exit_codes import RETRY_EXIT_CODE
from tests.infra.pods import go_on, played_group, played_vms, starts, wait_for_ranks
from tests.infra.sky_tasks import PlayedJobGroup
from tests.integration.jobs.in_a_pod import EVERY, STEPS, counted_after
from tests.support.cluster import wait_until


@pytest.mark.parametrize(
    ("scene", "name"), [(played_group, "stager"), (played_vms, "holdfast-stager")], ids=["group", "vms"]
)
def test_a_killed_rank_has_its_task_run_again_which_resumes_beside_the_same_stager(
    tmp_path: Path, scene: Callable[[Path], AbstractContextManager[PlayedJobGroup]], name: str
) -> None:
    with scene(tmp_path) as group:
        group.start()
        wait_for_ranks(group)
        (stager,) = group.of(name)
        go_on(group)
        os.kill(int((tmp_path / "out" / "pid-1").read_text()), signal.SIGKILL)
        assert RETRY_EXIT_CODE in group.settle(), group.output()
        assert group.settle() == [0, 0], group.output()
        for rank in range(2):
            before, after = starts(group, rank)
            assert (before, after >= STEPS - EVERY) == (0, True)
            assert (tmp_path / "out" / f"final-{rank}").read_text() == str(counted_after(after))
        # Nothing tells the stager to end: it writes during the delay before SkyPilot removes its pod.
        assert stager.process.poll() is None
        wait_until(
            lambda: STEPS - 1 in saved(tmp_path),
            60,
            lambda: f"the last step is not durable:\n{group.output()}",
        )


def test_a_bug_ends_the_ranks_with_a_code_of_its_own(tmp_path: Path) -> None:
    """With that code, or with that of its survivor, which asks for a restart, if SkyPilot sees that one first."""
    with played_group(tmp_path) as group:
        (tmp_path / "out" / "bug").touch()
        group.start()
        for _ in range(3):
            ended = group.settle()
            if RETRY_EXIT_CODE not in ended:
                break
        assert 1 in ended, group.output()
        assert "the bug of rank 1" in group.output()


def saved(folder: Path) -> set[int]:
    return {item.step for item in Catalog(open_store(str(folder / "store"))).list()}
