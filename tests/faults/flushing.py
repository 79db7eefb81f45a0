"""A real flusher process in a faulty environment, with a simulated stager."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.images import Image, from_torch_file
from tests.support.job import QUICK_SITE, REPOSITORY
from tests.support.stager_client import FlusherProcess

__all__ = ["FaultedFlusher", "flusher_environment", "image_of", "original", "wait_until"]

RANKS = 2
WAIT_SECONDS_MAX = 90.0


class FaultedFlusher(FlusherProcess):
    """`python -m flusher` with another environment, user rights and store than a healthy one.

    Args:
        base: For its log, events and runtime directory.
        store: URL or path of the run.
        env: Added to its environment.
        prefix: Command in front of it, such as `setpriv`.
        events: Another place for its events.
    """

    def __init__(
        self,
        base: Path,
        store: str,
        *options: str,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        chunk: str = "64KiB",
        ring: str = "1MiB",
        events: Path | None = None,
        stderr: Path | None = None,
    ) -> None:
        self.store = Path(store)
        self.events = events or base / "events.jsonl"
        self.log = stderr or base / "flusher.log"
        command = [
            *(*prefix, sys.executable, "-m", "flusher", "--create", "--store", store),
            *("--chunk-bytes", chunk, "--ring-bytes", ring, "--runtime-dir", str(base / "rt")),
            *("--events", str(self.events), "--grace-seconds", "0", *options),
        ]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=flusher_environment(env or {})
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.said: dict[str, Any] = json.loads(line) if line else {}

    def wait_for_event(self, event: str, **fields: object) -> dict[str, Any]:
        """Wait for the first event of this name with these fields."""

        def look() -> dict[str, Any] | None:
            return next((e for e in self.happened(event) if fields.items() <= e.items()), None)

        wait_until(
            lambda: look() is not None, lambda: f"no event {event} {fields}:\n{self.log.read_text()[-4000:]}"
        )
        found = look()
        assert found is not None
        return found

    def resident_bytes(self) -> int:
        """The flusher's anonymous memory, without files and shared memory."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("the kernel does not tell RssAnon")


def flusher_environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without holdfast's settings."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    return clean | {"PYTHONPATH": f"{QUICK_SITE}{os.pathsep}{REPOSITORY}"} | dict(more)


def original(seed: int, *, nbytes: int) -> dict[str, torch.Tensor]:
    """The state that is saved."""
    torch.manual_seed(seed)
    return {f"layer.{n}": torch.randn(nbytes // 16) for n in range(4)}


def image_of(directory: Path, seed: int, *, nbytes: int, chunk_bytes: int) -> Image:
    """The image of a `torch.save` file of about `nbytes`."""
    path = directory / f"original-{seed}.pt"
    torch.save(original(seed, nbytes=nbytes), path)
    return from_torch_file(path, chunk_bytes=chunk_bytes, ranks=RANKS)


def wait_until(
    condition: Callable[[], bool], message: Callable[[], str], seconds_max: float = WAIT_SECONDS_MAX
) -> None:
    """Poll until the condition holds; at the limit the test fails."""
    deadline = time.monotonic() + seconds_max
    while not condition():
        assert time.monotonic() < deadline, message()
        time.sleep(0.05)
