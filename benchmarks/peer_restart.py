"""Saves by another way to checkpoint in a job that is killed and restarted, and restores the newest complete save.

    attempt n: peer-n/ ─ saves in two places in turn ─ complete ─► newest.json (renamed: old or new, never half)
    attempt n + 1: newest.json ─► every rank loads that save ─► peer-(n + 1)/; other leftovers are removed

An attempt never overwrites the newest complete save, so a kill at any moment leaves one.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from benchmarks.peers import load
from benchmarks.peers.torch_save import TorchSave

if TYPE_CHECKING:
    from benchmarks.peers.dcp import AsyncSave
    from benchmarks.workload import Workload

__all__ = ["SAVES", "PeerRestart"]

SAVES = "saves.jsonl"
_NEWEST = "newest.json"
_LOOK_SECONDS = 0.001


class PeerRestart:
    """Saves every `every` steps by `torch.save+fsync` or `dcp-thread`. Every rank has one; for the training thread.

    Rank 0 appends the seconds until each save was complete to `SAVES` in `out`; it looks once in an iteration.
    """

    def __init__(self, name: str, workload: Workload, out: Path, attempt: int, every: int) -> None:
        self._workload, self._out, self._every, self._rank = workload, out, every, dist.get_rank()
        self._folder = out / f"peer-{attempt}"
        self._folder.mkdir(exist_ok=True)
        self._peer: TorchSave | AsyncSave
        if name == "torch.save+fsync":
            self._peer = TorchSave(workload, self._folder, self._rank)
        elif name == "dcp-thread":
            from benchmarks.peers.dcp import AsyncSave

            self._peer = AsyncSave(workload, self._folder, self._rank, process=False)
        else:
            raise ValueError(f"--peer {name}: expected torch.save+fsync or dcp-thread")
        self._open: tuple[int, float] | None = None  # step of the save in flight, and when it began

    def restore(self) -> int:
        """Load the newest complete save. Collective. Return the step to continue with, 0 without a save."""
        path = self._out / _NEWEST
        if not path.exists():
            return 0
        newest = json.loads(path.read_text())
        saved = Path(newest["path"])
        if saved.is_dir():
            from torch.distributed.checkpoint.filesystem import FileSystemReader
            from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

            load_dcp(self._workload.state_dict(tied=False), storage_reader=FileSystemReader(saved))
        else:
            state = load(saved)
            self._workload.model.load_state_dict(state["model"])
            self._workload.optimizer.load_state_dict(state["optimizer"])
        dist.barrier()
        if self._rank == 0:
            for folder in self._out.glob("peer-*"):
                if folder not in {self._folder, saved.parent}:
                    shutil.rmtree(folder)
        return int(newest["step"]) + 1

    def before_update(self) -> None:
        self._peer.before_update()

    def step(self, step: int) -> None:
        """Call after step `step`: record a save that is complete, and begin the next if it is due."""
        if self._open is not None and self._peer.done():
            self._complete()
        if (step + 1) % self._every:
            return
        while self._open is not None:  # before the next save overwrites the older place
            if self._peer.done():
                self._complete()
            else:
                time.sleep(_LOOK_SECONDS)
        self._open = (step, time.monotonic())
        self._peer.save(step)
        if self._peer.done():
            self._complete()

    def _complete(self) -> None:
        assert self._open is not None
        step, since = self._open
        self._open = None
        if self._rank:
            return
        with (self._out / SAVES).open("a") as file:
            file.write(json.dumps({"step": step, "seconds": time.monotonic() - since}) + "\n")
        half = self._out / f"{_NEWEST}.half"
        half.write_text(json.dumps({"step": step, "path": str(self._peer.newest)}))
        half.replace(self._out / _NEWEST)
