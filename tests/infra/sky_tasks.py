"""The tasks of infra/skypilot as processes of this machine, restarted by SkyPilot's rules.

Each pod of a task runs its `run` as a bash script, as SkyPilot does. When one ends with an error, SkyPilot kills the
others; then `recover_on_exit_codes` of the task decides (tests/infra/test_skypilot.py asks SkyPilot itself). This
module replaces the stager's name by 127.0.0.1, and ports by free ones. It ignores `setup`, names and real pods.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.infra.engine import PlayedPod
from tests.support.cluster import wait_until
from tests.support.free_port import free_port
from tests.support.job import environment

__all__ = ["PlayedJobGroup"]

_SECONDS_MAX = 240.0
_CANCELLED = 137


class PlayedJobGroup:
    """The tasks of one group. A context manager: no process of a task outlives the block.

    Args:
        documents: The file's documents: the group's header, and its tasks.
        folder: For logs and homes; `workspace/train.py` in it is the script.
        variables: Added to the file's own, or replacing them.

    Attributes:
        pods: The running pods.
    """

    def __init__(self, documents: list[dict[str, Any]], folder: Path, variables: Mapping[str, str]) -> None:
        self.folder, self.pods = folder, list[PlayedPod]()
        self._header, *tasks = documents
        self._tasks = {task["name"]: task for task in tasks}
        self._variables = variables
        self._replaced = {
            "stager-0.$SKYPILOT_JOBGROUP_NAME": "127.0.0.1",
            "0.0.0.0": "127.0.0.1",
            "29411": str(free_port()),
            "29400": str(free_port()),
        }

    def __enter__(self) -> PlayedJobGroup:
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.pods:
            pod.kill()

    def start(self) -> None:
        for name in self._tasks:
            self._start(name)

    def of(self, name: str) -> list[PlayedPod]:
        """The running pods of a task, by index."""
        return [pod for pod in self.pods if pod.job == name]

    def output(self) -> str:
        """Output of all pods."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')}" for log in logs)

    def settle(self) -> list[int]:
        """Run the primary tasks until one has ended, and restart it if the rules say so; return its exit codes."""
        (name,) = self._header["primary_tasks"]
        pods = self.of(name)

        def over() -> bool:
            codes = [pod.process.poll() for pod in pods]
            return any(codes) or None not in codes

        wait_until(over, _SECONDS_MAX, lambda: f"{name} does not end:\n{self.output()}")
        codes = [pod.process.poll() for pod in pods]
        for pod in pods:
            pod.kill()
        ended = [_CANCELLED if code is None else code for code in codes]
        if set(ended) & set(self._tasks[name]["resources"]["job_recovery"]["recover_on_exit_codes"]):
            self._start(name)
        return ended

    def _start(self, name: str) -> None:
        task = self._tasks[name]
        self.pods = [pod for pod in self.pods if pod.job != name]
        nodes = int(task.get("num_nodes", 1))
        for index in range(nodes):
            self.pods.append(self._pod(task, index, nodes))

    def _pod(self, task: Mapping[str, Any], index: int, nodes: int) -> PlayedPod:
        home = self.folder / f"{task['name']}-{index}"
        home.mkdir(exist_ok=True)
        if not (home / "holdfast").exists():  # made by `setup`
            (home / "holdfast").symlink_to(sys.prefix)
        given = {
            **{name: value for name, value in task.get("envs", {}).items() if name not in self._variables},
            **self._variables,
            "HOME": str(home),
            "SKYPILOT_TASK_ID": f"sky-managed-2026-11-25_{self._header['name']}_{task['name']}_1-0",
            "SKYPILOT_JOBGROUP_NAME": self._header["name"],
            "SKYPILOT_NUM_NODES": str(nodes),
            "SKYPILOT_NODE_RANK": str(index),
            "SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1"] * nodes),
            "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        }
        script = self._here(task["run"])
        if "HOLDFAST_STAGER" in given:
            given["HOLDFAST_STAGER"] = self._here(given["HOLDFAST_STAGER"])
        with (self.folder / f"{task['name']}-{index}.log").open("ab") as output:
            process = subprocess.Popen(
                ["bash", "-c", script],
                cwd=self.folder / "workspace" if "workdir" in task else home,
                env={**environment(home / "runtime", PATH=os.environ["PATH"]), **given},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return PlayedPod(task["name"], index, process)

    def _here(self, text: str) -> str:
        for word, replacement in self._replaced.items():
            text = text.replace(word, replacement)
        return text
