"""One training rank of the job that is measured: builds the workload once, then does what the hub orders.

    {"do": "prepare", "peer": P}            make the peer, as its users would: once
    {"do": "save", "peer": P, "step": S}    one checkpoint, timed                    → Sample
    {"do": "clean", "peer": P, "step": S}   remove what it left
    {"do": "reset_peak"}, {"do": "memory"}  resident bytes now and at most since the reset
    {"do": "close"}                         end all peers

Nothing is imported at the top that starts MPI or takes memory: DCP's writer process imports this module
again.
"""

from __future__ import annotations

import argparse
import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.hub import Link

if TYPE_CHECKING:
    from benchmarks.peers import Peer
    from benchmarks.workload import Workload

__all__ = ["main"]


class _Rank:
    def __init__(self, rank: int, model: str, folder: Path, compute_seconds: float) -> None:
        import torch

        from benchmarks.workload import Workload

        torch.set_num_threads(1)  # two ranks, two cores
        self._rank, self._folder, self._compute_seconds = rank, folder, compute_seconds
        self._workload: Workload = Workload(model)
        self._peers: dict[str, Peer] = {}

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do one order and return its answer."""
        from benchmarks import memory
        from benchmarks.peers import measure

        match order["do"]:
            case "prepare":
                self._peers[order["peer"]] = self._make(order["peer"])
                return {}
            case "save":
                return measure(
                    self._peers[order["peer"]], self._workload, order["step"], self._compute_seconds
                ).to_json()
            case "clean":
                self._peers[order["peer"]].clean(order["step"])
                return {}
            case "reset_peak":
                return {"reset": memory.reset_peak()}
            case "memory":
                return {
                    "resident_bytes": memory.resident_bytes(),
                    "peak_bytes": memory.peak_bytes(),
                    "parameters": self._workload.parameters,
                    "pid": os.getpid(),
                }
            case "close":
                for peer in self._peers.values():
                    peer.close()
                return {}
            case unknown:
                raise ValueError(f"no such order: {unknown!r}")

    def _make(self, name: str) -> Peer:
        if name == "holdfast":
            from benchmarks.peers.holdfast import Holdfast

            return Holdfast(self._workload)
        if name == "torch.save+fsync":
            from benchmarks.peers.torch_save import TorchSave

            return TorchSave(self._workload, self._folder, self._rank)
        from benchmarks.peers.dcp import AsyncSave

        return AsyncSave(self._workload, self._folder, self._rank, process=name == "dcp-process")


def main() -> None:
    """Entry point of a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hub", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--compute-seconds", type=float, required=True)
    arguments = parser.parse_args()
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    os.environ["RANK"] = str(rank)  # torch.distributed takes its place from these; WORLD_SIZE is set for all
    link = Link(arguments.hub, job="ranks", rank=rank)
    obedient = _Rank(rank, arguments.model, arguments.folder, arguments.compute_seconds)
    for order in link.orders():
        try:
            link.answer(obedient.obey(order))
        except Exception as error:  # noqa: BLE001 - or the hub would wait for minutes
            traceback.print_exc()
            link.answer({"error": f"{type(error).__name__}: {error}"})
    link.close()


if __name__ == "__main__":
    main()
