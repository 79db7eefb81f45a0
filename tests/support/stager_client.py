"""A flusher process, and a stager played by ring and socket alone: no MPI, every step by hand."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdfast.image.shares import WHOLE, ShareNumber
from holdfast.ring.doorbell import SOCKET_NAME, VERSION, Message, connect
from holdfast.ring.doubts import DoubtedSteps, write_doubts
from holdfast.ring.journal import SlotState
from holdfast.ring.ring import Ring
from holdfast.wire.doubt import Doubt
from tests.support.events import read_events
from tests.support.images import Image

DEADLINE_SECONDS = 120.0


class FlusherProcess:
    """`python -m flusher` on a run below `base`, or at the URL `store`."""

    def __init__(
        self,
        base: Path,
        *options: str,
        chunk: str = "64KiB",
        ring: str = "1MiB",
        fault: str = "",
        store: str = "",
    ) -> None:
        self.store = base / "store" / "run"
        self.url = store or str(self.store)
        self.events = base / "events.jsonl"
        command = [
            *(sys.executable, "-m", "flusher", "--create", "--store", self.url),
            *(("--ring-bytes", ring) if ring else ()),  # else it grows
            *("--chunk-bytes", chunk, "--runtime-dir", str(base / "rt")),
            *("--events", str(self.events), "--grace-seconds", "0", *options),
        ]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        if fault:
            clean["HOLDFAST_FAULT"] = fault
        with (base / "flusher.log").open("a") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=clean)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.said: dict[str, Any] = json.loads(line) if line else {}

    @property
    def directory(self) -> Path:
        """Its runtime directory."""
        return Path(self.said["directory"])

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        self.process.kill()
        self.process.wait(DEADLINE_SECONDS)

    def wait(self) -> int:
        """Its exit code."""
        code = self.process.wait(DEADLINE_SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def wait_killed(self) -> None:
        """Wait until its fault point has killed it."""
        assert self.process.wait(DEADLINE_SECONDS) == -signal.SIGKILL

    def freeze(self) -> None:
        """Stop it by SIGSTOP; only `kill` ends it."""
        self.process.send_signal(signal.SIGSTOP)

    def visible(self) -> list[str]:
        """Names in the run's folder, without the claims."""
        return sorted(path.name for path in self.store.iterdir() if path.name != ".holdfast")

    def hidden(self) -> list[str]:
        """Files below `.holdfast` that are not claims."""
        files = (path for path in (self.store / ".holdfast").rglob("*") if path.is_file())
        return sorted(path.name for path in files if not path.name.startswith("writer-"))

    def manifest(self, step: int) -> dict[str, Any]:
        """A step's manifest as JSON, from the newest attempt that has the step."""
        found = [json.loads(path.read_text()) for path in self.store.glob(f"step-{step:09d}*.json")]
        return max(found, key=lambda manifest: int(manifest["attempt"]), default={})

    def happened(self, event: str) -> list[dict[str, Any]]:
        """Lines of the event log."""
        return [line for line in read_events(self.events) if line["event"] == event]


class StagerClient:
    """Plays the stager. `share`, `lead_attempt`: its identity where there are several. `wait_seconds`: longest wait for
    the socket.

    Attributes:
        tells: Kinds of messages that are really sent; None: all.
    """

    def __init__(
        self,
        directory: Path,
        *,
        seed: int = 0,
        attempt: int = 0,
        share: ShareNumber = WHOLE,
        lead_attempt: int = 0,
        wait_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self.channel = connect(directory / SOCKET_NAME, wait_seconds=wait_seconds)
        self.heard: list[Message] = []
        self.tells: set[str] | None = None
        self.channel.send(
            "hello",
            version=VERSION,
            pid=os.getpid(),
            attempt=attempt,
            share=[share.index, share.writers],
            lead_attempt=lead_attempt,
        )
        try:
            self.welcome = self.wait("welcome").fields
        except AssertionError:
            self.channel.close()
            raise
        self.ring = Ring.attach(directory)
        self.attempt = self.ring.attempt
        self.chance = random.Random(seed)

    def wait(self, kind: str, **fields: object) -> Message:
        """The first message of this kind with these fields, received before or from now on."""
        until = time.monotonic() + DEADLINE_SECONDS
        while True:
            for message in self.heard:
                if message.kind == kind and fields.items() <= message.fields.items():
                    return message
            assert not self.channel.closed, f"waited for {kind} {fields}, heard {self.heard}"
            assert time.monotonic() < until, f"waited for {kind} {fields}, heard {self.heard}"
            select.select([self.channel], [], [], 1.0)
            self.heard += self.channel.poll()

    def begin(self, image: Image, step: int) -> None:
        """Begin a checkpoint."""
        digest = self.ring.put_layout(image.layout)
        self.ring.write_checkpoint(self.attempt, step, "receiving", digest, {})
        self._tell("begin", attempt=self.attempt, step=step, layout_digest=digest)

    def send(
        self, image: Image, step: int, chunks: Iterable[int], *, flip: tuple[int, int] | None = None
    ) -> None:
        """Receive chunks; `flip` is `(chunk, offset)` of a byte that is damaged on its way."""
        for chunk in chunks:
            slot = self.free_slot()
            self.ring.mark_filling(slot, self.attempt, step, chunk)
            data = bytearray(image.chunk_bytes(chunk))
            if flip is not None and flip[0] == chunk:
                data[flip[1]] ^= 1
            self.ring.slot_memory(slot)[: len(data)] = bytes(data)
            self.ring.mark_full(slot, image.sources(chunk), len(data))
            self._tell("chunk", slot=slot)

    def staged(self, image: Image, step: int) -> None:
        """Mark the checkpoint as staged: all chunks are in."""
        now = time.time()
        record = {
            "ranks": {str(rank): {"saved_at_unix": now - 2.0 + rank} for rank in range(image.layout.ranks)},
            "stager": {"staged_at_unix": now},
        }
        self.ring.write_checkpoint(self.attempt, step, "staged", image.layout.digest, record)
        self._tell("staged", attempt=self.attempt, step=step)

    def abort(self, step: int, reason: str) -> None:
        """Withdraw a checkpoint that has begun: the flusher frees the slots of its chunks."""
        self._tell("abort", attempt=self.attempt, step=step, reason=reason)

    def doubt(self, first: int, last: int) -> None:
        """Report these steps as possibly torn, as a rank does."""
        doubt = Doubt(0, (first, last), f"model/w was changed after save({last + 1})")
        write_doubts(self.ring.directory, [DoubtedSteps(self.attempt, doubt)])
        self._tell("doubt")

    def save(
        self,
        image: Image,
        step: int,
        *,
        flip: tuple[int, int] | None = None,
        shuffled: bool = True,
        chunks: Iterable[int] | None = None,
    ) -> None:
        """Save a whole checkpoint, or one share; chunks in any order as far as the ring has room for the lowest."""
        self.begin(image, step)
        left = list(range(image.layout.chunks) if chunks is None else chunks)
        while left:
            free = sum(self.ring.state(slot) is SlotState.FREE for slot in range(self.ring.ring_chunks))
            anywhere = shuffled and free > self.ring.ring_chunks // 2
            chunk = left.pop(self.chance.randrange(len(left)) if anywhere else 0)
            self.send(image, step, [chunk], flip=flip)
        self.staged(image, step)

    def free_slot(self) -> int:
        """Return any FREE slot; wait for one."""
        until = time.monotonic() + DEADLINE_SECONDS
        while True:
            free = [n for n in range(self.ring.ring_chunks) if self.ring.state(n) is SlotState.FREE]
            if free:
                return self.chance.choice(free)
            assert time.monotonic() < until, "no slot becomes free"
            select.select([self.channel], [], [], 1.0)
            self.heard += self.channel.poll()

    def _tell(self, kind: str, **fields: object) -> None:
        if self.tells is None or kind in self.tells:
            self.channel.send(kind, **fields)

    def finish(self) -> None:
        """End the training: wait until all is durable."""
        self.channel.send("finish")
        self.wait("drained")
        self.close()

    def close(self) -> None:
        """Disconnect from the flusher."""
        self.channel.close()
        self.ring.close()
