"""Where the commands of the pages find what they name: a home, a run with checkpoints in a bucket, another one in a
folder, logs, a trace, an outline of a cluster. Made once, by holdfast's own commands as far as there are any.

    scene/home/             HOME
    scene/checkout-made/    where it was made
    scene/checkout-PAGE/    where a page's lines are typed: the tree (links), train.py, files that the page names, and
                            mnt/run, which stands for /mnt/run
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.support.doc_commands import Shown, fences
from tests.support.ec2_place import client, write_outputs
from tests.support.job import NOT_LAUNCHED, REPOSITORY, environment
from tests.support.typing_pages import as_typed

__all__ = ["Scene", "Session"]

_NOT_OF_A_CHECKOUT = {"build", "infra"}  # what a page writes is not the repository's
_SECONDS_MAX = 500.0
_LAUNCHES_MAX = 3
# The reader's own script. Two layers less than its model has by default, and it ends.
_SCRIPT = """\
import runpy, sys
sys.argv[1:] = "--layers 1 --width 64 --steps 40 --every 10".split()
runpy.run_path("examples/train_gpt.py", run_name="__main__")
"""
# A job that leaves its log directory where the pages look; one beside it whose run is in a folder; slices without a
# stager; then what other tools would have written.
_MAKE = """\
set -e
mkdir -p mnt/nvme0 mnt/nfs
holdfast run -n 2 --store s3://bucket/run --logs ~/.local/state/holdfast/runs/logs -- python train.py
export HOLDFAST_EVENTS=$PWD/rank-0.jsonl
mpirun -n 1 python train.py : -n 1 holdfast stager --store mnt/run --events stager.jsonl
unset HOLDFAST_EVENTS
holdfast pull s3://bucket/run pulled.pt
python - <<'END'
import torch
state = torch.load("pulled.pt", weights_only=True)
torch.save(state, "old.pt")
torch.save({"model_state_dict": state["model"], "optimizer": state["optimizer"], "epoch": 3}, "checkpoint.pt")
END
"""
_MADE = ("rank-0.jsonl", "stager.jsonl", "old.pt", "checkpoint.pt", "mnt")


def _trace() -> Iterator[str]:
    """Two days: one of 16 machines is lost every two hours, and another one comes half an hour later."""
    yield ",Time,GPUs\n"
    for number in range(48):
        hours = number // 2 * 2 + number % 2 * 0.5
        yield f"{number},{1652434464 + 3600 * hours},{15 + number % 2}\n"


def _profile() -> str:
    """The figures of one's own that docs/simulate.md shows."""
    (block,) = (fence for fence in fences("docs/simulate.md") if fence.language == "json")
    return "\n".join(block.lines)


class Session(NamedTuple):
    """What came of it: the exit code of each line that was typed, by its number in the page; and all that was said."""

    codes: dict[int, int]
    said: str


class Scene:
    """Made by `make`; `close` ends whatever still lives of it.

    Args:
        directory: Empty; all of it lies there.
        s3: The environment of an S3 server with an empty bucket `bucket`.
        ec2_endpoint: URL of moto.
    """

    def __init__(self, directory: Path, s3: Mapping[str, str], ec2_endpoint: str) -> None:
        self.directory, self._ec2 = directory, client(ec2_endpoint)
        self.home, self._runtime = directory / "home", directory / "runtime"
        subnets = self._ec2.describe_subnets()["Subnets"]
        self._names = {"subnet": subnets[1]["SubnetId"], "venv": sys.prefix}
        self._service: subprocess.Popen[bytes] | None = None
        self._env = environment(
            self._runtime,
            **s3,
            AWS_ENDPOINT_URL_EC2=ec2_endpoint,
            HOME=str(self.home),
            HOLDFAST_RING_BYTES="128MiB",
            HOLDFAST_ON_FULL="wait",  # no step is declined: those that the pages name are there
            PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            # Root in a container, more processes than cores: what the README says of both.
            OMPI_ALLOW_RUN_AS_ROOT="1",
            OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
            PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",
            PRTE_MCA_hwloc_default_binding_policy="none",
        )
        del self._env["XDG_STATE_HOME"]  # logs lie where the pages say

    def make(self) -> None:
        """The runs, and files of the reader's."""
        (self.home / ".config/fish/completions").mkdir(parents=True)
        folder, session = self._launched("made", lambda _: _MAKE)
        assert all((folder / name).exists() for name in _MADE), session.said
        self._made = folder
        self._service = self._linger(folder)

    def _linger(self, folder: Path) -> subprocess.Popen[bytes]:
        """A flusher that waits for the next job: what `holdfast status` finds on the stager's machine."""
        events = folder / "ready"
        line = ["holdfast", "flusher", "--store", str(folder / "idle"), "--linger", "--events", str(events)]
        with (folder / "lingering").open("wb") as said:
            service = subprocess.Popen(
                line, env=self._env, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )
        while not events.exists() or "flusher_ready" not in events.read_text():
            assert service.poll() is None, (folder / "lingering").read_text()
            time.sleep(0.1)
        return service

    def type(self, page: str, lines: Sequence[Shown]) -> Session:
        """Type the lines of a page, one behind the other."""

        def script(folder: Path) -> str:
            for name in _MADE:
                subprocess.run(["cp", "-r", self._made / name, folder / name], check=True)
            names = {**self._names, "page": str(folder), "name": folder.name}
            typed = [(as_typed(line.text, names), line.number) for line in lines]
            return "\n".join(f"{text}\necho {number} $? >> {folder}/codes" for text, number in typed)

        return self._launched(page.replace("/", "-"), script)[1]

    def _launched(self, name: str, script: Callable[[Path], str]) -> tuple[Path, Session]:
        """Again, in a folder of its own, where mpirun itself failed before it had started anything."""
        for launch in range(_LAUNCHES_MAX):
            folder = self._checkout(f"{name}-{launch}")
            session = self._bash(folder, script(folder))
            if NOT_LAUNCHED not in session.said:
                break
        return folder, session

    def _checkout(self, name: str) -> Path:
        folder = self.directory / f"checkout-{name}"
        folder.mkdir()
        for path in REPOSITORY.iterdir():
            if path.name[0] != "." and path.name not in _NOT_OF_A_CHECKOUT:
                (folder / path.name).symlink_to(path)
        subprocess.run(["cp", "-r", REPOSITORY / "infra", folder / "infra"], check=True)
        (folder / "train.py").write_text(_SCRIPT)
        (folder / "hosts").write_text("localhost slots=2\n")
        (folder / "trace.csv").write_text("".join(_trace()))
        (folder / "mine.json").write_text(_profile())
        (folder / "other").mkdir()
        write_outputs(folder / "terraform-output.json", self._ec2, f"run-{name}")
        write_outputs(folder / "other/terraform-output.json", self._ec2, f"other-{name}")
        shutil.copy(folder / "terraform-output.json", folder / "infra/examples/cluster")
        return folder

    def _bash(self, folder: Path, script: str) -> Session:
        said, codes = folder / "said", folder / "codes"
        with said.open("wb") as output:
            shell = subprocess.Popen(
                ["bash", "-c", script],
                cwd=folder,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            shell.wait(_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
            self._end_others()
        pairs = [line.split() for line in codes.read_text().splitlines()] if codes.exists() else []
        return Session({int(number): int(code) for number, code in pairs}, said.read_text(errors="replace"))

    def close(self) -> None:
        """Nothing of it outlives this."""
        if self._service is not None:
            self._service.kill()
            self._service.wait()
        self._end_others()

    def _end_others(self) -> None:
        """Flushers live on for a while: no longer."""
        lasting = self._service.pid if self._service else None
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != lasting and process.environ().get("HOLDFAST_RUNTIME_DIR") == str(
                    self._runtime
                ):
                    process.kill()
