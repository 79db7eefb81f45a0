"""An engine that runs a JobSet's pods as processes of this machine, and restarts them as the manifest says.

Commands, arguments and environment come from the file. The engine replaces pods' names by 127.0.0.1, ports by free
ones, mount points by folders, and the variables that a test sets (sizes, store). It ignores nodes, images and limits.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from tests.infra.jobset_policies import JobSetPolicies
from tests.support.cluster import wait_until
from tests.support.free_port import free_port
from tests.support.job import HOLDFAST, environment

__all__ = ["PlayedJobSet", "PlayedPod"]

_SECONDS_MAX = 240.0


@dataclass
class PlayedPod:
    """One pod of a replicated job: its container's process, and whether it was disrupted with its node."""

    job: str
    index: int
    process: subprocess.Popen[bytes]
    disrupted: bool = False

    def terminate(self) -> None:
        """SIGTERM the container's first process, as the kubelet does first."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def evict(self) -> None:
        """Evict the pod, as when its node is drained."""
        self.disrupted = True
        self.terminate()

    def lose_node(self) -> None:
        """Lose the node, with all processes of the pod."""
        self.disrupted = True
        self.kill()

    def kill(self) -> None:
        """SIGKILL each process of the pod, including the flusher, which would outlive the pod's memory."""
        if self.process.poll() is None:
            for inner in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    inner.kill()
            self.process.kill()
        self.process.wait()


class PlayedJobSet:
    """Pods of one JobSet. A context manager: no pod outlives the block.

    Args:
        jobset: The document.
        folder: For mounts and logs; `workspace/train.py` in it is the script.
        secrets: Name of a secret or config map → its files → content.
        variables: Added to the file's own, or replacing them.

    Attributes:
        pods: The pods of the newest start. `actions`: actions of the failure policy so far, in order.
    """

    def __init__(
        self,
        jobset: Mapping[str, Any],
        folder: Path,
        *,
        secrets: Mapping[str, Mapping[str, str]],
        variables: Mapping[str, str],
    ) -> None:
        self.folder, self.pods, self.actions = folder, list[PlayedPod](), list[str]()
        self._spec, self._name, self._variables = jobset["spec"], jobset["metadata"]["name"], variables
        self._secrets, self._policies = secrets, JobSetPolicies(self._spec)
        self._ports = {
            str(port["containerPort"]): str(free_port())
            for job in self._spec["replicatedJobs"]
            for container in job["template"]["spec"]["template"]["spec"]["containers"]
            for port in container.get("ports", [])
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.pods:
            pod.kill()

    def start(self, *jobs: str) -> None:
        """Start the pods of these jobs, or of all, in the file's order; each waits for its dependencies."""
        for job in self._spec["replicatedJobs"]:
            if jobs and job["name"] not in jobs:
                continue
            for other in job.get("dependsOn", []):
                assert other["status"] == "Ready"
                self._wait_ready(other["name"])
            for index in range(job["template"]["spec"]["parallelism"]):
                self.pods.append(self._pod(job, index))

    def of(self, job: str) -> list[PlayedPod]:
        """The running pods of a job, by index."""
        return [pod for pod in self.pods if pod.job == job]

    def output(self) -> str:
        """Output of all pods."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')}" for log in logs)

    def settle(self) -> str:
        """Run the pods until the policies act; return "Completed", or the action. A restart has begun then."""
        targets = self._spec["successPolicy"]["targetReplicatedJobs"]
        failed: list[PlayedPod] = []

        def settled() -> bool:
            failed[:] = [pod for pod in self.pods if pod.process.poll() not in {None, 0}]
            return bool(failed) or all(pod.process.poll() == 0 for job in targets for pod in self.of(job))

        wait_until(
            settled, _SECONDS_MAX, lambda: f"no pod has failed, and the job is not done:\n{self.output()}"
        )
        if not failed:
            self._stop(self.pods)
            return "Completed"
        first = failed[0]
        action = self._policies.action(first.job, first.process.returncode, disrupted=first.disrupted)
        self.actions.append(action)
        if action == "ReplacePod":
            self._replace(first)
        elif action in {"RestartJobAndIgnoreMaxRestarts", "RestartJob"}:
            self._restart(first.job)
        elif action.startswith("RestartJobSet"):
            self._restart()
        else:
            self._stop(self.pods)
        return action

    def _replace(self, pod: PlayedPod) -> None:
        # A pod failure policy makes the Job wait for the old pod's end: two pods never have the same index at once.
        assert self._policies.job(pod.job)["template"]["spec"]["parallelism"] == 1
        self.pods.remove(pod)
        self.start(pod.job)

    def _restart(self, *jobs: str) -> None:
        # BlockingRecreate: all old pods end before the first new one starts.
        gone = [pod for pod in self.pods if not jobs or pod.job in jobs]
        self._stop(gone)
        self.pods = [pod for pod in self.pods if pod not in gone]
        self.start(*jobs)

    def _stop(self, pods: list[PlayedPod]) -> None:
        for pod in pods:
            pod.terminate()
        for pod in pods:
            spec = self._policies.job(pod.job)["template"]["spec"]["template"]["spec"]
            try:
                pod.process.wait(spec["terminationGracePeriodSeconds"])
            except subprocess.TimeoutExpired:
                pod.kill()

    def _wait_ready(self, name: str) -> None:
        (container,) = self._policies.job(name)["template"]["spec"]["template"]["spec"]["containers"]
        port = int(self._ports[str(container["startupProbe"]["tcpSocket"]["port"])])

        def listens() -> bool:
            assert all(pod.process.poll() is None for pod in self.of(name)), self.output()
            with socket.socket() as probe:
                return probe.connect_ex((self._address(name), port)) == 0

        wait_until(listens, _SECONDS_MAX, lambda: f"{name} does not become ready:\n{self.output()}")

    def _pod(self, job: Mapping[str, Any], index: int) -> PlayedPod:
        pod = job["template"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        home = self.folder / f"{job['name']}-{index}"
        # A pod's files are lost with it.
        shutil.rmtree(home, ignore_errors=True)
        mounts = {mount["mountPath"]: home / mount["name"] for mount in container["volumeMounts"]}
        for volume in pod["volumes"]:
            folder = home / volume["name"]
            folder.mkdir(parents=True)
            secret = volume.get("secret", {})
            name = secret.get("secretName") or volume.get("configMap", {}).get("name")
            for file, content in self._secrets[name].items() if name else ():
                (folder / file).write_text(content)
                (folder / file).chmod(secret.get("defaultMode", 0o644))
        given: dict[str, str] = {}
        for item in container["env"]:
            value = item["value"] if "value" in item else self._field(item, index)
            given[item["name"]] = self._here(_expanded(value, given), mounts)
        given |= self._variables
        env = environment(home / "unused", PATH=f"{Path(HOLDFAST).parent}{os.pathsep}{os.environ['PATH']}")
        command = [
            self._here(_expanded(word, given), mounts) for word in container["command"] + container["args"]
        ]
        workspace = self.folder / "workspace" if "workingDir" in container else home
        return self._begin(job["name"], index, command, workspace, {**env, **given})

    def _begin(
        self, job: str, index: int, line: list[str], place: Path, variables: dict[str, str]
    ) -> PlayedPod:
        with self._log(job, index).open("ab") as output:
            process = subprocess.Popen(
                line,
                cwd=place,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return PlayedPod(job, index, process)

    def _log(self, job: str, index: int) -> Path:
        return self.folder / f"{job}-{index}.log"

    def _address(self, job: str) -> str:
        return "127.0.0.1"

    def _field(self, item: Mapping[str, Any], index: int) -> str:
        path = str(item["valueFrom"]["fieldRef"]["fieldPath"])
        fields: dict[str, str] = {
            "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
            "metadata.labels['jobset.sigs.k8s.io/jobset-name']": self._name,
        }
        return fields[path]

    def _here(self, text: str, mounts: Mapping[str, Path]) -> str:
        """The value on this machine; each part is replaced once."""
        domain = re.escape(self._spec["network"].get("subdomain", self._name))
        pods = "|".join(rf"{self._name}-{job['name']}-\d+-\d+" for job in self._spec["replicatedJobs"])
        ports = "|".join(self._ports)
        found = re.fullmatch(
            rf"(?:(?P<pod>(?:{pods})\.{domain})|(?P<any>0\.0\.0\.0))?:?(?P<port>{ports})?", text
        )
        if found and text:
            host = "127.0.0.1" if found["pod"] or found["any"] else ""
            port = self._ports[found["port"]] if found["port"] else ""
            return f"{host}:{port}" if host and port else host or port
        for path, folder in mounts.items():
            if text.startswith(f"{path}/"):
                return f"{folder}{text.removeprefix(path)}"
        return text


def _expanded(text: str, known: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], text)
