"""The compared checkpointers, behind one small interface.

    start ── save() ──┬── compute ── before_update() ── optimizer step ──┬── … until done() ── end
              stall                       stall                                done

A stall is any time that the training thread spends beyond its computation. Every peer writes the same state to the same
place, and `verify` loads and compares its checkpoint, so that no peer wins by leaving something out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from benchmarks.workload import Workload

__all__ = ["NEVER_DURABLE", "OPTIONAL", "PEERS", "SHARDED", "TOGETHER", "Peer", "Place", "fresh", "make"]

# In the order of tables. The raw peers are no checkpointers, and run elsewhere.
PEERS = (
    "holdfast",
    "torch.save+fsync",
    "dcp-save",
    "dcp-thread",
    "dcp-process",
    "torchsnapshot",
    "checkfreq",
    "mlc-base",
    "pccheck-like",
    "gpm-like",
    "gemini-like",
)
# These peers keep checkpoints only in memory: their last level is staged.
NEVER_DURABLE = ("gemini-like",)
# For a state that is split among the ranks: benchmarks/peers/sharded.py.
SHARDED = ("dcp+to-torch", "dcp-hf", "full-state-dict")
# Peers whose buffers fit in memory together. holdfast joins every group, as ratios are within a round.
TOGETHER = (
    ("torch.save+fsync", "dcp-save", "dcp-thread", "dcp-process"),
    ("torchsnapshot", "checkfreq", "gpm-like", "gemini-like"),
    ("mlc-base", "pccheck-like"),
)
OPTIONAL = {"torchsnapshot": "torchsnapshot", "s3torchconnector": "s3torchconnector"}


class Peer(Protocol):
    """One way to save a state. All methods are called from the training thread."""

    def save(self, step: int) -> None:
        """Begin (or finish) the checkpoint of `step`; wait while this peer has no room for another one."""
        ...

    def before_update(self) -> None:
        """Wait until the state may change."""
        ...

    def done(self) -> bool:
        """Whether every checkpoint begun is in persistent storage, synced; for `NEVER_DURABLE`, in a peer's memory.

        Must be cheap: polled every millisecond.
        """
        ...

    def marks(self) -> dict[str, float]:
        """Times of milestones such as `staged` (monotonic seconds, same clock in all processes)."""
        ...

    def verify(self) -> int:
        """Load the newest checkpoint from storage and compare it with the state.

        Returns:
            Bytes of tensors that were compared; 0 on a rank that writes nothing.

        Raises:
            IncompleteError: The checkpoint differs from the state.
            OSError: There is no checkpoint.
        """
        ...

    def clean(self) -> None:
        """Remove the checkpoints in storage. Not timed."""
        ...

    def close(self) -> None:
        """End all threads and helper processes, and free the buffers."""
        ...


class Place(Protocol):
    """State, folder and settings from which a peer is made."""

    @property
    def workload(self) -> Workload: ...
    @property
    def folder(self) -> Path: ...
    @property
    def store(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...


def _holdfast(place: Place) -> Peer:
    from benchmarks.peers.holdfast import Holdfast

    return Holdfast(place.workload, place.store)


def _torch_save(place: Place) -> Peer:
    from benchmarks.peers.torch_save import TorchSave

    return TorchSave(place.workload, place.folder, place.rank)


def _dcp_save(place: Place) -> Peer:
    from benchmarks.peers.dcp import Save

    return Save(place.workload, place.folder, place.rank)


def _dcp_thread(place: Place) -> Peer:
    from benchmarks.peers.dcp import AsyncSave

    return AsyncSave(place.workload, place.folder, place.rank, process=False)


def _dcp_process(place: Place) -> Peer:
    from benchmarks.peers.dcp import AsyncSave

    return AsyncSave(place.workload, place.folder, place.rank, process=True)


def _torchsnapshot(place: Place) -> Peer:
    from benchmarks.peers.torchsnapshot import AsyncTake

    return AsyncTake(place.workload, place.folder, place.rank)


def _checkfreq(place: Place) -> Peer:
    from benchmarks.peers.checkfreq import CheckFreq

    return CheckFreq(place.workload, place.folder, place.rank)


def _mlc_base(place: Place) -> Peer:
    from benchmarks.peers.mlc_base import MlcBase

    return MlcBase(place.workload, place.folder, place.rank, place.ranks)


def _pccheck_like(place: Place) -> Peer:
    from benchmarks.peers.pccheck_like import PccheckLike

    return PccheckLike(place.workload, place.folder, place.rank)


def _gpm_like(place: Place) -> Peer:
    from benchmarks.peers.gpm_like import GpmLike

    return GpmLike(place.workload, place.folder, place.rank)


def _gemini_like(place: Place) -> Peer:
    from benchmarks.peers.gemini_like import GeminiLike

    return GeminiLike(place.workload, place.rank)


def _s3torchconnector(place: Place) -> Peer:
    from benchmarks.peers.s3_connector import S3Connector

    return S3Connector(place.workload, place.store, place.rank)


def _sharded(name: str) -> Callable[[Place], Peer]:
    def made(place: Place) -> Peer:
        from benchmarks.peers import sharded

        makers: dict[str, Callable[[Workload, Path, int], Peer]] = {
            "dcp+to-torch": sharded.DcpToTorch,
            "dcp-hf": sharded.HuggingFace,
            "full-state-dict": sharded.FullStateDict,
        }
        return makers[name](place.workload, place.folder, place.rank)

    return made


_MAKERS: dict[str, Callable[[Place], Peer]] = {
    "holdfast": _holdfast,
    "torch.save+fsync": _torch_save,
    "dcp-save": _dcp_save,
    "dcp-thread": _dcp_thread,
    "dcp-process": _dcp_process,
    "torchsnapshot": _torchsnapshot,
    "checkfreq": _checkfreq,
    "mlc-base": _mlc_base,
    "pccheck-like": _pccheck_like,
    "gpm-like": _gpm_like,
    "gemini-like": _gemini_like,
    "s3torchconnector": _s3torchconnector,
    **{name: _sharded(name) for name in SHARDED},
}


def make(name: str, place: Place) -> Peer:
    """Make a peer, as its users would.

    Raises:
        KeyError: No peer has this name.
    """
    return _MAKERS[name](place)


def fresh(path: Path) -> Path:
    """Return `path` after making its folder and removing what is at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return path


class Slots:
    """Two files in turn, for peers that keep their last checkpoint while they write the next."""

    def __init__(self, folder: Path, name: str) -> None:
        self._paths = (folder / f"{name}-0.pt", folder / f"{name}-1.pt")
        self._count = 0

    def next(self) -> Path:
        """Return the path for the next checkpoint."""
        self._count += 1
        return fresh(self.newest)

    @property
    def newest(self) -> Path:
        """Path of the last checkpoint."""
        return self._paths[self._count % 2]

    def remove(self) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)


def load(path: Path) -> Any:
    """Load a file with plain torch, memory-mapped to save memory."""
    import torch

    return torch.load(path, weights_only=True, mmap=True)
