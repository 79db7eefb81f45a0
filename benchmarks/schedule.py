"""One benchmark from start to end: jobs, warm-up, memory, idle CPU, rounds, result document.

start jobs ─► per peer: prepare, two saves, memory ─► idle CPU ─► rounds in turning order ─► end, summary
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import jobs, machine, memory, report
from benchmarks.hub import Hub
from benchmarks.peers import PEERS
from benchmarks.raw_direct import DirectWriter
from holdfast.layout import CHUNK_BYTES
from holdfast.manifest import Manifest, State

__all__ = ["Settings", "run", "turn"]

# A toy streams through a ring smaller than itself, too.
_TOY_CHUNK_BYTES, _TOY_RING_BYTES_MAX = 1 << 16, 1 << 20
_WARM_UP_SAVES = 2  # the first allocates and agrees, the second shows the steady state
_QUIET_SECONDS = 0.3
_VERIFY_SECONDS_MAX = 60.0


@dataclass(frozen=True)
class Settings:
    """What a benchmark does.

    Attributes:
        compute_seconds: Length of the timed wait that stands in for a step's computation on a device.
        idle_seconds: How long idle CPU is watched.
        ring_bytes: Size of the stager's ring, and of the memory into which raw MPI receives.
        folder: Where all peers write; None is the place for temporary files.
    """

    rounds: int
    model: str
    ranks: int
    compute_seconds: float
    idle_seconds: float
    ring_bytes: int = 1 << 30  # the stager's default
    peers: tuple[str, ...] = PEERS
    folder: Path | None = None


def turn(peers: Sequence[str], number: int) -> list[str]:
    """Order of the peers in round `number`: turned by one each time, so that no place is anybody's."""
    first = number % len(peers) if peers else 0
    return [*peers[first:], *peers[:first]]


def run(settings: Settings, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure, and return the result document. Leaves no process and no file.

    Raises:
        RuntimeError: A job failed; the message holds the end of its output.
    """
    with jobs.folders(settings.folder) as folders, Hub(folders.scratch / "hub") as hub:
        try:
            return _Schedule(settings, folders, hub, progress).run()
        except (RuntimeError, TimeoutError) as error:
            logs = [
                f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}"
                for log in folders.scratch.glob("*.log")
            ]
            raise RuntimeError("\n".join([str(error), *logs])) from error


class _Schedule:
    def __init__(
        self, settings: Settings, folders: jobs.Folders, hub: Hub, progress: Callable[[str], None]
    ) -> None:
        self._settings, self._folders, self._hub, self._progress = settings, folders, hub, progress
        self._step = 0
        self._peers = [peer for peer in PEERS if peer in settings.peers]
        self._toy = settings.model != "small"
        self._chunk_bytes = _TOY_CHUNK_BYTES if self._toy else CHUNK_BYTES
        self._ring_bytes = min(settings.ring_bytes, _TOY_RING_BYTES_MAX) if self._toy else settings.ring_bytes
        self._direct: DirectWriter | None = None
        self._manifests: list[Manifest] = []

    def run(self) -> dict[str, Any]:
        settings = self._settings
        environment = jobs.rank_environment(
            settings.ranks, self._folders, chunk_bytes=self._chunk_bytes, ring_bytes=self._ring_bytes
        )
        rank = ["-m", "benchmarks.rank", "--hub", str(self._hub.path), "--model", settings.model]
        rank += [
            "--folder",
            str(self._folders.scratch / "peers"),
            "--compute-seconds",
            str(settings.compute_seconds),
        ]
        stager = [
            str(Path(sys.executable).with_name("holdfast")),
            "stager",
            "--store",
            str(self._folders.store),
        ]
        with jobs.Job(
            "ranks", settings.ranks, rank, stager, environment=environment, folder=self._folders.scratch
        ) as training:
            self._progress(f"building {settings.model} on {settings.ranks} ranks")
            self._hub.gather("ranks", settings.ranks, ended=lambda: training.ended)
            memory_of_ranks = self._warm_up()
            image_bytes = self._manifests[-1].image_bytes
            raw = [
                "-m",
                "benchmarks.raw_mpi",
                "sender",
                "--hub",
                str(self._hub.path),
                "--nbytes",
                str(image_bytes),
            ]
            raw += ["--chunk-bytes", str(self._chunk_bytes)]
            raw += ["--ring-chunks", str(self._ring_bytes // self._chunk_bytes)]
            receiver = [sys.executable, *(word if word != "sender" else "receiver" for word in raw)]
            with jobs.Job(
                "raw_mpi",
                settings.ranks,
                raw,
                receiver,
                environment=environment,
                folder=self._folders.scratch,
            ) as transfer:
                self._hub.gather("raw_mpi", settings.ranks + 1, ended=lambda: transfer.ended)
                self._direct = DirectWriter(self._folders.scratch, image_bytes, self._chunk_bytes)
                processes = self._processes(training)
                footprints = {
                    name: asdict(memory.footprint(processes[name])) for name in ("stager", "flusher")
                }
                self._progress(f"idle CPU over {settings.idle_seconds:.0f} s")
                idle = memory.idle_cpu_percent(processes, settings.idle_seconds)
                self._figures("raw_mpi")  # warm-up
                rounds = [self._round(number) for number in range(settings.rounds)]
                self._direct.close()
                self._hub.ask("ranks", {"do": "close"})
                self._hub.close()
                codes = {"raw_mpi": transfer.end(), "ranks": training.end()}
            ended = jobs.end_process(processes["flusher"])
        summary = report.summarise(rounds)
        return {
            "machine": machine.describe(self._folders.scratch),
            "settings": {
                **{key: value for key, value in asdict(settings).items() if key != "folder"},
                "image_bytes": image_bytes,
                "ring_bytes": self._ring_bytes,
                "chunk_bytes": self._chunk_bytes,
                "parameters": memory_of_ranks.pop("parameters"),
            },
            "summary": summary,
            "rounds": rounds,
            "memory": {"ranks": memory_of_ranks, **footprints},
            "idle_cpu_percent": idle,
            "expectations": [] if self._toy else report.expectations(summary, idle),
            "records": [manifest.record for manifest in self._manifests],
            "ended_by_itself": {"flusher": ended, **{job: code == 0 for job, code in codes.items()}},
        }

    # -- the parts -----------------------------------------------------------------------------------------

    def _warm_up(self) -> dict[str, Any]:
        """Make each peer, save twice, and see what memory it took on the rank that took most."""
        result: dict[str, Any] = {}
        for peer in self._peers:
            self._progress(f"warming up {peer}")
            before = self._hub.ask("ranks", {"do": "memory"})
            self._hub.ask("ranks", {"do": "reset_peak"})
            self._hub.ask("ranks", {"do": "prepare", "peer": peer})
            for _ in range(_WARM_UP_SAVES):
                self._figures(peer)
            after = self._hub.ask("ranks", {"do": "memory"})
            pairs = list(zip(before, after, strict=True))
            extra = [b["resident_bytes"] - a["resident_bytes"] for a, b in pairs]
            # Resident bytes count child processes too, the kernel's peak does not: take the greater.
            peak = [max(b["peak_bytes"], b["resident_bytes"]) - a["resident_bytes"] for a, b in pairs]
            result[peer] = {
                "extra_bytes": max(extra),
                "extra_peak_bytes": max(peak),
                "by_rank": {"extra_bytes": extra, "extra_peak_bytes": peak},
            }
            result["parameters"] = after[0]["parameters"]
        return result

    def _processes(self, training: jobs.Job) -> dict[str, int]:
        trainer = self._hub.ask("ranks", {"do": "memory"})[0]["pid"]
        return {
            "stager": training.find("stager"),
            "flusher": jobs.flusher_pid(self._folders.runtime),
            "trainer": trainer,
        }

    def _round(self, number: int) -> dict[str, dict[str, float]]:
        self._progress(f"round {number + 1} of {self._settings.rounds}")
        return {peer: self._figures(peer) for peer in turn([*self._peers, "raw_mpi", "raw_direct"], number)}

    def _figures(self, peer: str) -> dict[str, float]:
        """One turn of one peer, and quiet afterwards."""
        if peer == "raw_mpi":
            answers = self._hub.ask("raw_mpi", {"do": "transfer"})
            figures = {"done_seconds": max(a["end"] for a in answers) - min(a["start"] for a in answers)}
        elif peer == "raw_direct":
            assert self._direct is not None
            by_threads = {threads: self._direct.write(threads) for threads in (1, 2)}
            best = min(by_threads, key=lambda threads: by_threads[threads])
            figures = {"done_seconds": by_threads[best], "threads": float(best)}
        else:
            step, self._step = self._step, self._step + 1
            figures = report.round_figures(self._hub.ask("ranks", {"do": "save", "peer": peer, "step": step}))
            self._hub.ask("ranks", {"do": "clean", "peer": peer, "step": step})
            if peer == "holdfast":
                figures.update(self._verified(step))
        os.sync()  # what was removed is freed on the disk now, and not in the next peer's turn
        time.sleep(_QUIET_SECONDS)
        return figures

    def _verified(self, step: int) -> dict[str, float]:
        """Wait until holdfast has read `step` back, so that it does not work in another peer's turn."""
        deadline = time.monotonic() + _VERIFY_SECONDS_MAX
        path = self._folders.store / f"step-{step:09d}.json"
        while time.monotonic() < deadline:
            if path.exists():
                manifest = Manifest.from_bytes(path.read_bytes(), source=str(path))
                if manifest.state is State.VERIFIED:
                    self._manifests.append(manifest)
                    return {
                        "manifest_pgt1_seconds": manifest.pgt1_seconds,
                        "manifest_pgt2_seconds": manifest.pgt2_seconds,
                    }
                if manifest.state is State.BAD:
                    raise RuntimeError(f"step {step} was read back and is bad: {manifest.note}")
            time.sleep(0.05)
        raise TimeoutError(f"step {step} was not verified within {_VERIFY_SECONDS_MAX:.0f} s")
