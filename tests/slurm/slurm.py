"""A real Slurm on hosts of tests/hosts: munged on this machine, slurmctld on the stager's host, slurmd on every host.

    cluster_of ─► hosts ── ssh ─► slurmctld, slurmd ─► slurm.submit("--nodes=2") ─► holdfast.sbatch ─► srun ─► ranks

Its settings, keys, state and logs are in a folder of the test; hosts are network namespaces, so ports do not clash.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence

import pytest

from tests.hosts.cluster import STAGER, Cluster
from tests.hosts.network import why_not as why_no_hosts
from tests.support.cluster import wait_until
from tests.support.job import REPOSITORY

__all__ = ["SCRIPT", "Slurm", "running_slurm", "why_not"]

SCRIPT = REPOSITORY / "infra" / "slurm" / "holdfast.sbatch"
_TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "srun", "squeue")
_UP_SECONDS_MAX = 30.0
_KEY_BYTES = 1024

# Sixteen CPUs each, however many this machine has: test ranks are few and small.
_CONF = """\
ClusterName=holdfast
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
SlurmctldDebug=verbose
SlurmdDebug=debug
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldParameters=preempt_send_user_signal
SlurmdTimeout=10
KillWait={kill_wait_seconds}
MinJobAge=600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={names} CPUs=16 State=UNKNOWN
PartitionName=spot Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=90
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""


def why_not() -> str:
    """Return why no Slurm can run here, or ""."""
    missing = [tool for tool in _TOOLS if _found(tool) is None]
    if missing:
        return f"no {', '.join(missing)} here (`make slurm` installs slurmctld, slurmd, slurm-client, munge)"
    return why_no_hosts()


def _found(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Slurm:
    """The daemons of one Slurm. Made by `running_slurm`.

    Args:
        cluster: The hosts. `STAGER` is the controller's, which is never lost, and where jobs are submitted.
        names: The names of the hosts that are nodes.
    """

    def __init__(self, cluster: Cluster, names: Sequence[str], *, kill_wait_seconds: int) -> None:
        self.cluster, self.names = cluster, tuple(names)
        self.directory = cluster.directory / "slurm"
        self._kill_wait_seconds = kill_wait_seconds
        self._daemons: list[subprocess.Popen[bytes]] = []

    # -- a user's commands

    def on(self, host: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, as a logged-in user would."""
        line = f"SLURM_CONF={self.directory}/slurm.conf {shlex.join(words)}"
        return subprocess.run(
            [*self.cluster.ssh, host, line], capture_output=True, text=True, check=False, timeout=60
        )

    def said(self, *words: str) -> str:
        """Output of a command on the controller's host; the command must succeed."""
        done = self.on(STAGER, *words)
        assert done.returncode == 0, f"{shlex.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *options: str, script: Sequence[str]) -> int:
        """`sbatch OPTIONS SCRIPT…`; return the job's number."""
        line = ["sbatch", "--parsable", "--chdir", str(self.cluster.directory), *options, *script]
        return int(self.said(*line))

    def job(self, number: int) -> dict[str, str]:
        """Slurm's record of a job: JobState, Restarts, ExitCode, ..."""
        text = self.said("scontrol", "show", "job", str(number), "--oneliner")
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def until(self, number: int, state: str, seconds_max: float = 120) -> None:
        """Wait until the job is in this state; the test fails if it ends in another one."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"} - {state}

        def there() -> bool:
            now = self.job(number)["JobState"]
            assert now not in over, f"job {number} is {now}, expected {state}:\n{self.story(number)}"
            return now == state

        try:
            wait_until(there, seconds_max, f"job {number} is not {state}")
        except AssertionError as error:
            pytest.fail(f"{error}\n{self.story(number)}")

    def story(self, number: int) -> str:
        """Logs and status, for the message of a failed test."""
        out = self.cluster.directory / f"slurm-{number}.out"
        said = out.read_text(errors="replace")[-8000:] if out.exists() else "no output"
        return f"{self.job(number)}\n{said}"

    # -- set up and torn down

    def make(self) -> None:
        """Write keys and settings, start the daemons, and wait until every node is idle."""
        for name in ("", "state", *(f"spool-{name}" for name in self.names)):
            (self.directory / name).mkdir(mode=0o755)
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(_KEY_BYTES))
        key.chmod(0o400)
        (self.directory / "slurm.conf").write_text(
            _CONF.format(
                controller=STAGER,
                directory=self.directory,
                names=",".join(self.names),
                kill_wait_seconds=self._kill_wait_seconds,
            )
        )
        # slurmd 22.05 requires a cgroup plugin even if unused; this one opens no file before it is used.
        (self.directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        munged = ["munged", "--foreground", "--force", "--num-threads=2"]
        for option, name in (
            ("key-file", "key"),
            ("socket", "socket"),
            ("pid-file", "pid"),
            ("seed-file", "seed"),
        ):
            munged.append(f"--{option}={self.directory}/munge.{name}")
        self._start("munged", munged)
        wait_until((self.directory / "munge.socket").exists, _UP_SECONDS_MAX, "munged does not come up")
        self._daemon(STAGER, "slurmctld")
        for name in self.names:
            self._daemon(name, "slurmd")
        wait_until(self._all_idle, _UP_SECONDS_MAX, "not every node became idle")

    def _all_idle(self) -> bool:
        done = self.on(STAGER, "sinfo", "--noheader", "--Node", "--partition=spot", "--format=%N %T")
        return sorted(done.stdout.split("\n"))[1:] == sorted(f"{name} idle" for name in self.names)

    def _daemon(self, host: str, name: str) -> None:
        line = f"exec /usr/sbin/{name} -D -f {self.directory}/slurm.conf"
        if name == "slurmd":
            line += f" -N {host}"
        self._start(f"{name}-{host}", [*self.cluster.ssh, "-tt", host, line])

    def _start(self, name: str, command: Sequence[str]) -> None:
        found = _found(command[0]) or command[0]
        with (self.directory / f"{name}.said").open("ab") as said:
            self._daemons.append(
                subprocess.Popen(
                    [*("setpriv", "--pdeathsig", "KILL"), found, *command[1:]],
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                )
            )

    def remove(self) -> None:
        """Stop the daemons of this machine; those on the hosts end with their hosts."""
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait(30)


@contextlib.contextmanager
def running_slurm(cluster: Cluster, names: Sequence[str], *, kill_wait_seconds: int = 20) -> Iterator[Slurm]:
    """Start Slurm on running hosts; at the end stop its daemons on this machine."""
    slurm = Slurm(cluster, names, kill_wait_seconds=kill_wait_seconds)
    try:
        slurm.make()
        yield slurm
    finally:
        slurm.remove()
