"""A standing stager as a real process, for jobs without mpirun."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.cluster import SMALL
from tests.support.job import HOLDFAST

__all__ = ["StandingProcess", "standing_stager"]

_LISTENS_SECONDS_MAX = 120.0
_ENDS_SECONDS_MAX = 60.0


class StandingProcess:
    """`holdfast stager --listen`.

    Attributes:
        address: Where it listens.
        process: The stager's.
    """

    def __init__(
        self,
        store: str,
        env: Mapping[str, str],
        log: Path,
        more: Sequence[str],
        *,
        listen: str = "127.0.0.1:0",
        verbose: bool = False,
    ) -> None:
        self.log, shared = log, ["-v"] if verbose else []
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [HOLDFAST, *shared, "stager", "--store", store, "--listen", listen, *more],
                env=dict(env),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.address = self._await_address()

    def _await_address(self) -> str:
        deadline = time.monotonic() + _LISTENS_SECONDS_MAX
        while time.monotonic() < deadline:
            found = re.search(r"listens at (\S+);", self.output())
            if found:
                return found[1]
            assert self.process.poll() is None, self.output()
            time.sleep(0.05)
        raise AssertionError(f"it does not listen: {self.output()}")

    def output(self) -> str:
        """The stager's output so far."""
        return self.log.read_text(errors="replace")

    def stop(self) -> int:
        """SIGTERM the stager, which ends when all staged steps are in the store; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_ENDS_SECONDS_MAX)

    def kill(self) -> None:
        """SIGKILL the stager; its flusher runs in a session of its own and survives."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def standing_stager(
    store: str,
    env: Mapping[str, str],
    log: Path,
    *more: str,
    settings: Sequence[str] = SMALL,
    listen: str = "127.0.0.1:0",
    verbose: bool = False,
) -> Iterator[StandingProcess]:
    """A stager for the block; killed at the block's end."""
    stager = StandingProcess(store, env, log, [*settings, *more], listen=listen, verbose=verbose)
    try:
        yield stager
    finally:
        stager.kill()
