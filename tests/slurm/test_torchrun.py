"""infra/slurm/torchrun.sbatch under a real Slurm: torchrun on each node, and a stager on a host that is not a node."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
from collections.abc import Iterator

import pytest

from holdfast.net.key import new_key
from tests.hosts.cluster import STAGER
from tests.integration.jobs import in_a_pod
from tests.integration.jobs.in_a_pod import EVERY, MET_AT, STEPS, counted_after
from tests.slurm.slurm import SCRIPT
from tests.slurm.story import Story

pytestmark = [pytest.mark.timeout(400)]

TORCHRUN_SCRIPT = SCRIPT.with_name("torchrun.sbatch")
PORT = 29411
SECONDS_MAX = 120.0


class TorchrunStory:
    """One job of the script on two nodes, one rank on each, and its stager.

    Args:
        story: The hosts and their Slurm.
    """

    def __init__(self, story: Story) -> None:
        self.story, self.out = story, story.cluster.directory / "out"
        self.out.mkdir()
        self._key = story.cluster.directory / "run-key"
        self._key.write_text(new_key())
        self._key.chmod(0o600)

    @contextlib.contextmanager
    def stager(self) -> Iterator[None]:
        """A stager for the block; at the end it is told to stop, writes everything, and ends with 0."""
        cluster, pid = self.story.cluster, self.out / "pid-stager"
        line = shlex.join(
            [
                *("holdfast", "stager", "--store", cluster.store, "--listen", f"0.0.0.0:{PORT}"),
                *("--key-file", str(self._key), "--chunk-bytes", "64KiB", "--ring-bytes", "4MiB"),
            ]
        )
        command = [*cluster.ssh, STAGER, f"echo $$ >{shlex.quote(str(pid))}; exec {line}"]
        with (
            (cluster.directory / "stager.out").open("wb") as said,
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said) as process,
        ):
            try:
                self.story.until(lambda: " listens at " in self._said(), "the stager does not listen")
                yield
                assert process.poll() is None, self._said()
                self.story.slurm.said("kill", "-TERM", pid.read_text().strip())
                assert process.wait(SECONDS_MAX) == 0, self._said()
            finally:
                process.kill()

    def submit(self) -> None:
        settings = {
            "HOLDFAST_STAGER": f"{STAGER}:{PORT}",
            "HOLDFAST_KEY_FILE": self._key,
            "PET_NPROC_PER_NODE": 1,
            "OUT": self.out,
        }
        exported = ",".join(["ALL", *(f"{name}={value}" for name, value in settings.items())])
        self.story.number = self.story.slurm.submit(
            "--nodes=2", f"--export={exported}", script=[str(TORCHRUN_SCRIPT), in_a_pod.__file__]
        )

    def until_ready(self) -> None:
        """Wait until both ranks stand by in mid-run; ranks of the next start will not."""
        ready = [self.out / f"ready-{rank}" for rank in range(2)]
        self.story.until(lambda: all(path.exists() for path in ready), "the ranks do not come so far")
        (self.out / "go-on").touch()

    def start_again(self) -> None:
        """Start the requeued job without Slurm's wait of two minutes, after the script of the last start has ended;
        otherwise that end would count as the next one's.
        """
        slurm = self.story.slurm
        slurm.until(self.story.number, "PENDING")
        nodes = [self.story.cluster.host(name) for name in slurm.names]

        def over() -> bool:
            lines = [line for node in nodes for line in node.commands()]
            return not any("slurmstepd" in line or "slurm" not in line for line in lines)

        self.story.until(over, "the last start does not end")
        self.story.start_now()

    def starts(self, rank: int) -> list[int]:
        """The first step of each start of a rank."""
        return [int(line) for line in (self.out / f"start-{rank}").read_text().split()]

    def check_ended(self, state: str, *, restarts: int) -> None:
        """Check the job's own end; the stager keeps serving."""
        self.story.slurm.until(self.story.number, state)
        assert self.story.slurm.job(self.story.number)["Restarts"] == str(restarts)

    def _said(self) -> str:
        return (self.story.cluster.directory / "stager.out").read_text(errors="replace")


@pytest.fixture
def torchrun(story: Story) -> TorchrunStory:
    return TorchrunStory(story)


def test_a_killed_rank_puts_the_job_back_into_the_queue_and_it_resumes_beside_the_same_stager(
    torchrun: TorchrunStory,
) -> None:
    story = torchrun.story
    with torchrun.stager():
        torchrun.submit()
        torchrun.until_ready()
        pid = (torchrun.out / "pid-1").read_text()
        assert story.slurm.on("t2", "kill", "-KILL", pid).returncode == 0
        torchrun.start_again()
        torchrun.check_ended("COMPLETED", restarts=1)
    for rank in range(2):
        before, after = torchrun.starts(rank)
        assert (before, after >= STEPS - EVERY) == (0, True)
        assert (torchrun.out / f"final-{rank}").read_text() == str(counted_after(after))
    assert story.check_checkpoints()
    story.check_nothing_left()


def test_the_signal_before_the_time_limit_saves_one_more_step_and_puts_the_job_back(
    torchrun: TorchrunStory,
) -> None:
    """`--signal=TERM@120`, sent by hand: to the tasks of the job, and not to its script."""
    story = torchrun.story
    with torchrun.stager():
        torchrun.submit()
        torchrun.until_ready()
        story.slurm.said("scancel", "--signal=TERM", str(story.number))
        torchrun.start_again()
        torchrun.check_ended("COMPLETED", restarts=1)
    starts = {tuple(torchrun.starts(rank)) for rank in range(2)}
    ((before, after),) = starts
    assert before == 0
    # The step saved because of the notice is later than any step due without it.
    assert after > MET_AT + 1
    assert after - 1 in story.check_checkpoints()
    story.check_nothing_left()


def test_a_bug_ends_the_job_and_its_code_is_kept_from_the_75_of_the_survivor(torchrun: TorchrunStory) -> None:
    story = torchrun.story
    (torchrun.out / "bug").touch()
    with torchrun.stager():
        torchrun.submit()
        torchrun.check_ended("FAILED", restarts=0)
    bug = story.cluster.directory / f"bug-{story.number}-0"
    assert bug.read_text().split() == ["1"]
    assert "the bug of rank 1" in story.slurm.story(story.number)
    story.check_nothing_left()
