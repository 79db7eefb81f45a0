"""A job whose ranks are forked from one process (rank_server.py), beside a stager that listens on TCP."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.support.free_port import free_port
from tests.support.job import HOLDFAST, Job
from tests.support.rank_server import ForkedRanks

__all__ = ["ForkedJob"]

_LISTENS_SECONDS_MAX = 120.0


class ForkedJob(Job):
    """Takes the arguments of `Job`; `rewrite` and `ulfm` are for mpirun only. Ranks and stager share the log."""

    def __init__(
        self,
        ranks: int,
        trainer: Sequence[str],
        stager: Sequence[str] | None,
        *,
        env: Mapping[str, str],
        log: Path,
        ulfm: bool = True,
        rewrite: Callable[[list[str]], list[str]] = list,
    ) -> None:
        assert rewrite is list
        self.log, address = log, {}
        self._stager: subprocess.Popen[bytes] | None = None
        log.write_bytes(b"")
        if stager is not None:
            # The stager counts a killed rank as lost at once, as under mpirun.
            line = [HOLDFAST, "stager", *stager, "--listen", "127.0.0.1:0", "--once"]
            with log.open("ab") as output:
                self._stager = subprocess.Popen(
                    [*line, "--reconnect-seconds-max", "1"],
                    env=dict(env),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            address = {"HOLDFAST_STAGER": self._listens_at()}
        meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.process = ForkedRanks(ranks, trainer, {**env, **address, **meeting}, log)  # type: ignore[assignment]

    def _listens_at(self) -> str:
        assert self._stager is not None
        deadline = time.monotonic() + _LISTENS_SECONDS_MAX
        while (found := re.search(r"listens at (\S+);", self.output())) is None:
            assert self._stager.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)
        return found[1]

    def wait(self, seconds_max: float) -> int:
        """Wait for the stager too. The exit code is that of the ranks."""
        code = super().wait(seconds_max)
        if self._stager is not None:
            self._stager.wait(seconds_max)
        return code

    def kill(self) -> None:
        """SIGKILL ranks and stager."""
        super().kill()
        if self._stager is not None and self._stager.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._stager.pid, signal.SIGKILL)
            self._stager.wait()
