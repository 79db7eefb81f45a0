"""One MPI job of ranks, stager and flusher that takes orders, and the steps that all experiments share.

    with running(shape, progress) as cluster:
        cluster.prepare(peer) ─► cluster.save(peer) … ─► cluster.train(peer, …) … ─► cluster.drop(peer)

holdfast is prepared first, since stager and flusher wait for the ranks, and never dropped: a rank joins once.

No peer has work left when its turn ends: holdfast has verified its checkpoint, files are removed, no page is dirty.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import psutil

from benchmarks import jobs, machine, memory
from benchmarks.hub import Hub
from benchmarks.shaped_job import Links, ShapedJob
from benchmarks.spread import round_figures
from benchmarks.workload import is_toy
from holdfast.errors import StoreMissing
from holdfast.image.layout import CHUNK_BYTES
from holdfast.image.manifest import Manifest, State, manifest_name, step_file_name
from holdfast.store import open_store
from holdfast.store.retrying import Retrying

__all__ = ["Cluster", "Clusters", "Shape", "running", "turn"]

# A toy streams through a ring smaller than itself, too.
_TOY_CHUNK_BYTES, _TOY_RING_BYTES_MAX = 1 << 16, 1 << 20
_WARM_UP_SAVES = 2  # the first allocates and agrees, the second shows the steady state
_QUIET_SECONDS = 0.2
_VERIFY_SECONDS_MAX = 60.0
_SETTLE_SECONDS_MAX = 60.0
_SETTLED_PERCENT_MAX = 2.0
_LOOK_AGAIN_SECONDS = 0.02
_LOOK_AGAIN_REMOTE_SECONDS = 0.5  # the server shares the cores with the flusher that this waits for

Progress = Callable[[str], None]
_Peer = TypeVar("_Peer")


@dataclass(frozen=True)
class Shape:
    """Model, store and processes of a job.

    Attributes:
        model: See `benchmarks.workload`.
        ring_bytes: Size of the stager's ring; None: the ring grows as needed, as by default.
        store: Path or URL of the run; empty: a folder beside those of the other peers.
        folder: Where all peers write; None is the folder for temporary files.
        launcher: `mpirun`, with the stager in the job; or `torchrun`, with a standing stager.
        stager_inside: Prefix of the standing stager's command, such as one that enters a cgroup.
        links: Put ranks and stagers in network namespaces with these links, without a launcher; None: no namespaces.
    """

    model: str = "gpt2"
    ranks: int = 2
    ring_bytes: int | None = None
    chunk_bytes: int = CHUNK_BYTES
    store: str = ""
    folder: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    launcher: str = "mpirun"
    stager_inside: tuple[str, ...] = ()
    links: Links | None = None

    def fitted(self) -> Shape:
        """The same, with chunks and ring that fit a toy if it is one."""
        if not is_toy(self.model) or self.chunk_bytes != CHUNK_BYTES:
            return self
        ring = min(self.ring_bytes or _TOY_RING_BYTES_MAX, _TOY_RING_BYTES_MAX)
        return replace(self, ring_bytes=ring, chunk_bytes=_TOY_CHUNK_BYTES)


def turn(peers: Sequence[_Peer], number: int) -> list[_Peer]:
    """Return the peers rotated by `number`, so that no peer always has the same place."""
    first = number % len(peers) if peers else 0
    return [*peers[first:], *peers[:first]]


class Cluster:
    """A running job, made by `running`; for one thread."""

    def __init__(
        self, shape: Shape, folders: jobs.Folders, hub: Hub, job: jobs.Job, progress: Progress
    ) -> None:
        self.shape, self.folders, self.hub, self.progress = shape, folders, hub, progress
        self.store = shape.store or str(folders.store)
        self.remote = "://" in self.store
        self._opened = cast(Retrying, open_store(self.store))
        self.manifests: list[Manifest] = []
        self.ended_by_itself: dict[str, bool] = {}
        self.job, self._step = job, 0
        self._prepared: set[str] = set()
        self._compared: set[str] = set()

    @property
    def ring_bytes(self) -> int:
        """Current size of the ring."""
        (ring,) = self.folders.runtime.glob("*/ring")
        return ring.stat().st_size

    # -- orders ------------------------------------------------------------------------------------------------------

    def ask(self, **order: Any) -> list[dict[str, Any]]:
        """Send one order to all ranks; return their answers by rank."""
        return self.hub.ask("ranks", order)

    def prepare(self, peer: str, *, saves: int = _WARM_UP_SAVES) -> dict[str, Any]:
        """Make a peer, save twice, compare its files with the state, and return the largest memory use of any rank.

        A peer that exists already is left alone; one that existed earlier saves once.

        Raises:
            RuntimeError: A file differs from the state that was saved.
        """
        if peer in self._prepared:
            return {}
        self.progress(f"warming up {peer}")
        before = self.ask(do="memory")
        self.ask(do="reset_peak")
        self.ask(do="prepare", peer=peer)
        self._prepared.add(peer)
        if peer in self._compared:
            self.save(peer)
            return {}
        for number in range(saves):
            self.save(peer, clean=number + 1 < saves)
        after = self.ask(do="memory")
        compared = 0
        if saves:
            compared = max(answer["compared_bytes"] for answer in self.ask(do="verify", peer=peer))
            self._compared.add(peer)
            self.clean(peer)
            self.quiet()
            if peer == "holdfast":
                self._settle()
            if not compared and not (peer == "holdfast" and self.remote):
                raise RuntimeError(f"{peer}: nothing that it wrote could be compared")
        pairs = list(zip(before, after, strict=True))
        # Resident bytes include child processes, the kernel's peak does not: take the larger.
        peak = [max(b["peak_bytes"], b["resident_bytes"]) - a["resident_bytes"] for a, b in pairs]
        return {
            "extra_bytes": max(b["resident_bytes"] - a["resident_bytes"] for a, b in pairs),
            "extra_peak_bytes": max(peak),
            "compared_bytes": compared,
        }

    def save(self, peer: str, *, compute_seconds: float = 0.25, clean: bool = True) -> dict[str, float]:
        """Take one checkpoint, wait for quiet, and return the checkpoint's figures.

        For holdfast, `cpu_seconds` lasts until the read-back is done and includes the training; the wait for quiet
        does not count.
        """
        step, stolen, cpu = self._steps(1), machine.stolen(), self.cpu_seconds()
        samples = self.ask(do="save", peer=peer, step=step, compute_seconds=compute_seconds)
        figures = {**round_figures(samples), "stolen_share": stolen()}
        if peer == "holdfast":
            figures.update(self._verified(step))
            figures["cpu_seconds"] = self.cpu_seconds() - cpu
        if clean:
            self.clean(peer)
        self.quiet()
        return figures

    def train(
        self, peer: str, *, iterations: int, every: int, compute: str = "device", compute_seconds: float = 0.2
    ) -> dict[str, Any]:
        """Train, saving every `every` iterations, then wait for quiet; `peer` may be "none".

        Returns:
            `makespan_seconds`: from the first rank's start to the last one's end; `durable_seconds`: until the last
            checkpoint is durable; `iteration_seconds` of the slowest rank in each; `saves`; `cpu_seconds` of all
            processes until all is durable, and read back by holdfast.
        """
        step = self._steps(iterations)
        before = self.cpu_seconds()
        runs = self.ask(
            do="train",
            peer=peer,
            step=step,
            iterations=iterations,
            every=every,
            compute=compute,
            compute_seconds=compute_seconds,
        )
        start = min(run["start"] for run in runs)
        if peer == "holdfast":
            self._verified(step + (iterations - 1) // every * every)
        cpu_seconds = self.cpu_seconds() - before
        if peer != "none":
            self.clean(peer)
        self.quiet()
        return {
            "makespan_seconds": max(run["end"] for run in runs) - start,
            "durable_seconds": max(run["durable"] for run in runs) - start,
            "iteration_seconds": [
                max(several) for several in zip(*(run["iteration_seconds"] for run in runs), strict=True)
            ],
            "saves": runs[0]["saves"],
            "cpu_seconds": cpu_seconds,
        }

    def pace(self, *, iterations: int, every: int, compute_seconds: float) -> dict[str, Any]:
        """Train with holdfast, which may choose the interval (`benchmarks.pacing`). Call `quiet` afterwards.

        Returns:
            `iteration_seconds` of the slowest rank in each; `saved`: at which steps.

        Raises:
            RuntimeError: The ranks have saved at different steps.
        """
        step = self._steps(iterations)
        runs = self.ask(
            do="pace", step=step, iterations=iterations, every=every, compute_seconds=compute_seconds
        )
        if any(run["saved"] != runs[0]["saved"] for run in runs):
            raise RuntimeError(f"the ranks saved at different steps: {[run['saved'] for run in runs]}")
        if runs[0]["saved"]:
            self._verified(runs[0]["saved"][-1])
        return {
            "iteration_seconds": [
                max(several) for several in zip(*(run["iteration_seconds"] for run in runs), strict=True)
            ],
            "saved": runs[0]["saved"],
        }

    def restore(self, how: str, source: str, *, compare: bool = True) -> dict[str, float]:
        """Restore the state from storage into zeroed tensors; return the slowest rank's seconds.

        Args:
            how: "holdfast", or "torch.load" with `source`.
            source: A file, or `s3://bucket/key` by s3torchconnector.
            compare: Require the restored state to equal the present one, which is the checkpoint's.
        """
        answers = self.ask(do="restore", how=how, source=source, compare=compare)
        return {name: max(answer[name] for answer in answers) for name in answers[0]}

    def drop(self, peer: str) -> None:
        """End a peer and free its memory."""
        self.ask(do="drop", peer=peer)
        self._prepared.remove(peer)

    def clean(self, peer: str) -> None:
        """Remove a peer's files."""
        self.ask(do="clean", peer=peer)

    # -- looking -----------------------------------------------------------------------------------------------------

    def cpu_seconds(self) -> float:
        """User and system seconds so far of ranks, their helpers, stagers and flushers."""
        pids = {*self.flusher_pids, *self.job.pids()}  # a set: the stager's children include its flusher
        total = 0.0
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = psutil.Process(pid).cpu_times()
                total += times.user + times.system
        return total

    @property
    def flusher_pids(self) -> list[int]:
        """Process ids of the flushers, one for each stager."""
        return jobs.flusher_pids(self.folders.runtime)

    def pids(self) -> dict[str, int]:
        """Process ids of stager, flusher and rank 0; with several stagers, of the first."""
        return {
            "stager": self.job.find("stager"),
            "flusher": self.flusher_pids[0],
            "trainer": int(self.ask(do="memory")[0]["pid"]),
        }

    def quiet(self) -> None:
        """Collect garbage in the ranks and sync the disk, so that neither happens in the next peer's turn."""
        self.ask(do="collect")
        os.sync()
        time.sleep(_QUIET_SECONDS)

    def _settle(self) -> None:
        """Wait until the flusher has moved the grown ring into huge pages, so that no turn pays for that."""
        deadline = time.monotonic() + _SETTLE_SECONDS_MAX
        flushers = {f"flusher {pid}": pid for pid in self.flusher_pids}
        while time.monotonic() < deadline:
            if max(memory.idle_cpu_percent(flushers, 1.0).values()) < _SETTLED_PERCENT_MAX:
                return
        self.progress(f"the flusher is still busy after {_SETTLE_SECONDS_MAX:.0f} s")

    def path(self, step: int) -> Path:
        """Path of the file that holdfast published for `step`."""
        return Path(self.store) / step_file_name(step)

    def _steps(self, count: int) -> int:
        first, self._step = self._step, self._step + count
        return first

    def _verified(self, step: int) -> dict[str, float]:
        """Wait until holdfast has read `step` back, so that the read-back disturbs no other peer's turn."""
        deadline = time.monotonic() + _VERIFY_SECONDS_MAX
        name = manifest_name(step_file_name(step))
        while time.monotonic() < deadline:
            with contextlib.suppress(StoreMissing):
                manifest = Manifest.from_bytes(self._opened.read(name), source=name)
                if manifest.state is State.VERIFIED:
                    self.manifests.append(manifest)
                    return {
                        "manifest_pgt1_seconds": manifest.pgt1_seconds,
                        "manifest_pgt2_seconds": manifest.pgt2_seconds,
                    }
                if manifest.state is State.BAD:
                    raise RuntimeError(f"step {step} was read back and is bad: {manifest.note}")
            time.sleep(_LOOK_AGAIN_REMOTE_SECONDS if self.remote else _LOOK_AGAIN_SECONDS)
        raise TimeoutError(f"step {step} was not verified within {_VERIFY_SECONDS_MAX:.0f} s")

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all processes in order; see `ended_by_itself`."""
        flushers = self.flusher_pids
        self.ask(do="close")
        self.hub.close()
        self._opened.close()
        self.ended_by_itself["ranks"] = self.job.end() == 0
        self.ended_by_itself["flusher"] = all(list(map(jobs.end_process, flushers)))


@contextlib.contextmanager
def running(shape: Shape, progress: Progress) -> Iterator[Cluster]:
    """Start a job; at the end, remove all its processes and files.

    Raises:
        RuntimeError: The job failed, and the message holds the end of its output; or it did not end by itself.
    """
    shape = shape.fitted()
    with jobs.folders(shape.folder) as folders, Hub(folders.scratch / "hub") as hub:
        environment = {
            **jobs.rank_environment(
                shape.ranks, folders, chunk_bytes=shape.chunk_bytes, ring_bytes=shape.ring_bytes
            ),
            **shape.environment,
        }
        store = shape.store or str(folders.store)
        rank = ["-m", "benchmarks.rank", "--hub", str(hub.path), "--model", shape.model]
        rank += ["--folder", str(folders.scratch / "peers"), "--store", store]
        stager = [str(Path(sys.executable).with_name("holdfast")), "stager", "--store", store]
        try:
            kind: Callable[..., jobs.Job] = jobs.Job
            if shape.launcher == "torchrun":
                kind = partial(jobs.TorchrunJob, inside=shape.stager_inside)
            if shape.links is not None:
                kind = partial(ShapedJob, links=shape.links, store=store)
            with kind(
                "ranks", shape.ranks, rank, stager, environment=environment, folder=folders.scratch
            ) as job:
                progress(f"building {shape.model} on {shape.ranks} ranks")
                hub.gather("ranks", shape.ranks, ended=lambda: job.ended)
                cluster = Cluster(shape, folders, hub, job, progress)
                yield cluster
                cluster.close()
        except (RuntimeError, TimeoutError) as error:
            logs = [
                f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}"
                for log in folders.scratch.glob("*.log")
            ]
            raise RuntimeError("\n".join([str(error), *logs])) from error
    left = [name for name, ended in cluster.ended_by_itself.items() if not ended]
    if left:
        raise RuntimeError(f"did not end well by itself: {', '.join(left)}")


class Clusters:
    """Keeps the last job for the next request of the same shape, since a start takes longer than many measurements.

    For one thread. A context manager: at its end no job is left.
    """

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._shape: Shape | None = None
        self._cluster: Cluster | None = None

    @contextlib.contextmanager
    def running(self, shape: Shape, progress: Progress, *, fresh: bool = False) -> Iterator[Cluster]:
        """Yield the running job if it has this shape, else a new one.

        Raises:
            RuntimeError: See `benchmarks.cluster.running`.
        """
        if fresh or shape != self._shape or self._cluster is None:
            self.close()
            self._cluster = self._stack.enter_context(running(shape, progress))
            self._shape = shape
        self._cluster.progress = progress
        try:
            yield self._cluster
        except BaseException as error:
            stack, self._stack, self._cluster = self._stack, contextlib.ExitStack(), None
            stack.__exit__(type(error), error, error.__traceback__)  # raises with the logs
            raise

    def close(self) -> None:
        """End the running job, if there is one."""
        stack, self._stack, self._cluster = self._stack, contextlib.ExitStack(), None
        stack.close()

    def __enter__(self) -> Clusters:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
