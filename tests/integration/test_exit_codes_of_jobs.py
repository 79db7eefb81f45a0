"""`holdfast rank` around the ranks of real jobs, and around torchrun: each end has its exit code."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from operator_side.supervise.exit_codes import RETRY_EXIT_CODE
from tests.integration.jobs import coded
from tests.support.cluster import SMALL, Cluster, wait_until
from tests.support.job import HOLDFAST, Job, environment
from tests.support.torchrun import torchrun_command

SECONDS_MAX = 250.0
_MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path, str(tmp_path / "store"), {}, script=coded.__file__)


def signalled(cluster: Cluster, job: Job, number: int, *, wrapper: bool = False) -> None:
    """Send the signal to rank 1, or to its wrapper, once it stands still."""
    out = cluster.out(cluster.started)
    wait_until((out / "paused-1").exists, SECONDS_MAX, lambda: f"no pause:\n{job.output()}")
    rank = psutil.Process(int((out / "pid-1").read_text()))
    target = rank.parent() if wrapper else rank
    assert target is not None
    target.send_signal(number)


def codes(cluster: Cluster, job: Job) -> list[int]:
    job.succeed(SECONDS_MAX)
    return [int((cluster.out(cluster.started) / f"code-{rank}").read_text()) for rank in range(2)]


@pytest.mark.mpi
def test_a_killed_rank_and_its_survivor_ask_to_be_started_again(cluster: Cluster) -> None:
    with cluster.start(2, "pause", "--restarts-max", "0") as job:  # it has taken checkpoints, so it may
        signalled(cluster, job, signal.SIGKILL)
        assert codes(cluster, job) == [RETRY_EXIT_CODE, RETRY_EXIT_CODE], job.output()
        assert "was killed by SIGKILL from outside; exit code 75: start the job again" in job.output()


@pytest.mark.mpi
def test_a_bug_has_its_code_and_its_survivor_asks_to_be_started_again(cluster: Cluster) -> None:
    with cluster.start(2, "raise") as job:
        assert codes(cluster, job) == [RETRY_EXIT_CODE, 1], job.output()


@pytest.mark.mpi
def test_ranks_that_leave_at_a_notice_of_one_of_them_ask_to_be_started_again(cluster: Cluster) -> None:
    with cluster.start(2, "leave", env={"HOLDFAST_WATCH": "sigterm"}) as job:
        signalled(cluster, job, signal.SIGTERM, wrapper=True)
        assert codes(cluster, job) == [RETRY_EXIT_CODE, RETRY_EXIT_CODE], job.output()
        assert "ended with 0 after a preemption notice" in job.output()


@pytest.mark.mpi
def test_sigterm_that_nobody_watches_ends_the_rank_and_is_a_preemption(cluster: Cluster) -> None:
    with cluster.start(2, "pause") as job:
        signalled(cluster, job, signal.SIGTERM, wrapper=True)
        assert codes(cluster, job) == [RETRY_EXIT_CODE, RETRY_EXIT_CODE], job.output()


def around(*command: str, runtime: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HOLDFAST, "rank", *command],
        env=environment(runtime, **env),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def test_around_torchrun_the_code_is_that_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    command = torchrun_command(2, [coded.__file__, str(tmp_path), "done", "in it"])
    done = around("--", *command, runtime=tmp_path / "runtime")
    assert done.returncode == 2, done.stderr  # torchrun ends with 1 whatever its ranks end with
    assert "(holdfast.errors.ConfigError); exit code 2" in done.stderr


def test_around_torchrun_a_killed_rank_is_a_preemption_once_the_job_has_joined(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    env = {"HOLDFAST_TIERS": f"file:{disk}", "HOLDFAST_STORE": str(tmp_path / "store"), "CODED_KILLS": "1"}
    command = torchrun_command(2, [coded.__file__, str(tmp_path), "pause", "in it"])
    done = around("--", *command, runtime=tmp_path / "runtime", **env)
    assert done.returncode == RETRY_EXIT_CODE, done.stderr
    assert "rank 1 on" in done.stderr
    assert "was killed by SIGKILL from outside; exit code 75" in done.stderr


def test_sigusr1_goes_past_torchrun_to_the_ranks_however_early_it_comes(tmp_path: Path) -> None:
    """torchrun handles it not, and would die of it; so would a rank that does not watch it yet."""
    env = {"HOLDFAST_TIERS": f"file:{tmp_path}", "HOLDFAST_STORE": str(tmp_path / "store")}
    wrapper = subprocess.Popen(
        [HOLDFAST, "rank", "--", *torchrun_command(2, [coded.__file__, str(tmp_path), "leave", "in it"])],
        env=environment(tmp_path / "runtime", **env, HOLDFAST_WATCH="sigusr1"),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: handles(wrapper.pid, signal.SIGUSR1), SECONDS_MAX, "SIGUSR1 would end it")
        wrapper.send_signal(signal.SIGUSR1)
        _, said = wrapper.communicate(timeout=SECONDS_MAX)
    finally:
        wrapper.kill()
    assert "holdfast rank: SIGUSR1 is kept: no process of this job handles it yet" in said
    # One that hears of it from the other, and ends with it, may not have its own any more.
    assert re.search("rank [01] received a preemption notice: terminate in", said)
    assert "the checkpoint of step" in said, said
    assert wrapper.returncode == RETRY_EXIT_CODE, said


def handles(pid: int, number: int) -> bool:
    caught = next(
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")
    )
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_sigterm_while_it_judges_does_not_take_the_place_of_the_code(tmp_path: Path) -> None:
    """A pipe that is full holds it at the line that says why; whoever stops a job signals until it is gone."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writing, b"x" * 4096):
            pass
    os.set_blocking(writing, True)
    wrapper = subprocess.Popen(
        [HOLDFAST, "rank", "--", "sh", "-c", "exit 5"], env=environment(tmp_path / "runtime"), stderr=writing
    )
    os.close(writing)
    try:
        wait_until(lambda: ignores(wrapper.pid, signal.SIGTERM), SECONDS_MAX, "SIGTERM would still end it")
        wrapper.send_signal(signal.SIGTERM)
        with os.fdopen(reading, "rb") as stderr:
            assert stderr.read().endswith(b"; exit code 5\n")
        assert wrapper.wait(SECONDS_MAX) == 5
    finally:
        wrapper.kill()


def ignores(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = re.findall(r"^SigIgn:\s+(\w+)$", status, re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.fixture
def standing(tmp_path: Path) -> Iterator[str]:
    """Address of a stager that serves one job after the other."""
    said = tmp_path / "stager.log"
    line = [HOLDFAST, "stager", "--store", str(tmp_path / "store"), "--listen", "127.0.0.1:0", *SMALL]
    with said.open("wb") as output:
        stager = subprocess.Popen(line, env=environment(tmp_path / "runtime"), stdout=output, stderr=output)
    try:
        wait_until(lambda: " listens at " in said.read_text(), SECONDS_MAX, "the stager does not listen")
        yield said.read_text().partition(" listens at ")[2].partition(";")[0]
    finally:
        stager.terminate()
        stager.wait(SECONDS_MAX)


def test_jobs_of_one_stager_are_counted_whatever_machine_they_are_started_on(
    standing: str, tmp_path: Path
) -> None:
    """By the numbers that the stager gives them; when it began it has taken none itself."""

    def run(number: int, how: str) -> subprocess.CompletedProcess[str]:
        out = tmp_path / f"machine-{number}"
        out.mkdir()
        command = torchrun_command(2, [coded.__file__, str(out), how, "in it"])
        return around(
            "--restarts-max", "1", "--", *command, runtime=out, HOLDFAST_STAGER=standing, CODED_KILLS="1"
        )

    for number, (how, code) in enumerate(
        [("early", RETRY_EXIT_CODE), ("early", 137), ("pause", RETRY_EXIT_CODE)]
    ):
        done = run(number, how)
        assert done.returncode == code, done.stderr
        if code == 137:
            assert "2 attempts in a row without a newer checkpoint" in done.stderr


def test_a_stager_that_cannot_be_reached_is_no_reason_to_start_again_for_ever(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        env = {"HOLDFAST_STAGER": f"127.0.0.1:{nobody.getsockname()[1]}", "HOLDFAST_START_SECONDS_MAX": "3"}
        command = torchrun_command(1, [coded.__file__, str(tmp_path), "done", "in it"])
        done = around("--", *command, runtime=tmp_path / "runtime", **env)
    assert done.returncode == 9, done.stderr
    assert "before it had joined the job" in done.stderr


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with little memory."""
    made = _MEMORY / f"holdfast-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no control group of memory can be made here: {error}")
    try:
        (made / "memory.limit_in_bytes").write_text(str(200 << 20))
        yield made
    finally:
        _remove(made)


def _remove(group: Path) -> None:
    """Once it is empty: a job's flusher outlives it by some seconds."""
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


_HUNGRY = "print(len(b'x' * (2 << 30)))"


def in_group(group: Path, *command: str, runtime: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command],
        env=environment(runtime),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def test_a_kill_for_memory_is_told_from_a_preemption(group: Path, tmp_path: Path) -> None:
    wrapped = [HOLDFAST, "rank", "--", sys.executable, "-c", _HUNGRY]
    done = in_group(group, *wrapped, runtime=tmp_path / "runtime")
    assert done.returncode == 137, done.stderr
    assert "was killed by the kernel because the memory was used up" in done.stderr
