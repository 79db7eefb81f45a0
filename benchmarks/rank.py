"""One training rank of the measured job: builds the workload once, then carries out the hub's orders.

    {"do": "prepare", "peer": P}            make the peer, as its users would
    {"do": "save", "peer": P, "step": S}    one checkpoint, timed                                   → Sample
    {"do": "train", "peer": P, …}           a run that saves every K iterations; P may be "none"    → Run
    {"do": "pace", …}                       the same by holdfast, which may choose the interval          → Paced
    {"do": "verify", "peer": P}             load the checkpoint from storage, and compare it with the state
    {"do": "clean", "peer": P}              remove the peer's files
    {"do": "collect"}                       collect garbage, and return free memory to the system
    {"do": "drop", "peer": P}               end the peer, and free its buffers
    {"do": "restore", "how": H, …}          restore into zeroed tensors, timed, and compare
    {"do": "compare", "source": S}          compare the state with a file of torch.save
    {"do": "gate", "coarse": B}             make holdfast's gate wait for the whole copy, or layer by layer again
    {"do": "update", "seconds": U}          make an update take U seconds, and leave the CPU idle
    {"do": "reset_peak"}, {"do": "memory"}  resident bytes, now and the peak since the reset
    {"do": "close"}                         end all peers

The top of this module imports nothing that starts MPI or takes memory: DCP's writer process imports it, too.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.hub import Link

if TYPE_CHECKING:
    from benchmarks.peers import Peer
    from benchmarks.workload import Workload

__all__ = ["force_gate", "main"]


class _Rank:
    """State of this rank, and the `Place` of its peers."""

    def __init__(self, arguments: argparse.Namespace, rank: int, ranks: int) -> None:
        import torch
        import torch.distributed as dist

        from benchmarks.workload import Workload, is_bare, is_sharded

        torch.set_num_threads(1)  # two ranks share two cores
        self.rank, self.ranks = rank, ranks
        self.folder: Path = arguments.folder
        self.store: str = arguments.store
        self._peers: dict[str, Peer] = {}
        self._operations_per_second = 0.0
        if ranks > 1:
            dist.init_process_group("gloo")  # address, rank and size come from the environment
            # A separate group: DCP's background threads use the default one.
            self._meeting = dist.new_group(backend="gloo")
            self._token = torch.zeros(1)
        if is_bare(arguments.model):
            # 32 ranks start on two cores; half of a rank's start would be a compiler that it does not need.
            from tests.support.no_compiler import do_without_compiler

            do_without_compiler()
        self.workload: Workload
        if is_sharded(arguments.model):
            from benchmarks.sharded_workload import ShardedWorkload

            self.workload = ShardedWorkload(arguments.model)
        else:
            self.workload = Workload(arguments.model)

    def meet(self) -> None:
        """Wait at a barrier of all ranks."""
        if self.ranks > 1:
            import torch.distributed as dist

            dist.all_reduce(self._token, group=self._meeting)

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry out one order and return its answer."""
        action: Callable[[dict[str, Any]], dict[str, Any]] | None = getattr(self, f"_do_{order['do']}", None)
        if action is None:
            raise ValueError(f"no such order: {order['do']!r}")
        return action(order)

    def _do_prepare(self, order: dict[str, Any]) -> dict[str, Any]:
        from benchmarks.peers import make

        if order["peer"] not in self._peers:
            self._peers[order["peer"]] = make(order["peer"], self)
        return {}

    def _do_save(self, order: dict[str, Any]) -> dict[str, Any]:
        from benchmarks.training import measure

        peer = self._peers[order["peer"]]
        return measure(peer, self.workload, order["step"], order["compute_seconds"]).to_json()

    def _do_train(self, order: dict[str, Any]) -> dict[str, Any]:
        from benchmarks.training import train

        run = train(
            None if order["peer"] == "none" else self._peers[order["peer"]],
            self.workload,
            first_step=order["step"],
            iterations=order["iterations"],
            every=order["every"],
            compute=self._compute(order["compute"], order["compute_seconds"]),
            meet=self.meet,
        )
        return run.to_json()

    def _do_pace(self, order: dict[str, Any]) -> dict[str, Any]:
        from benchmarks.pacing import pace
        from benchmarks.peers.holdfast import Holdfast

        peer = self._peers["holdfast"]
        assert isinstance(peer, Holdfast)
        run = pace(
            peer.checkpointer,
            self.workload,
            first_step=order["step"],
            iterations=order["iterations"],
            every=order["every"],
            compute=self._compute("device", order["compute_seconds"]),
            meet=self.meet,
        )
        return run.to_json()

    def _compute(self, kind: str, seconds: float) -> Callable[[], None]:
        match kind:
            case "device":
                return lambda: time.sleep(seconds)
            case "cpu":
                return self.workload.compute
            case "python":
                from benchmarks.training import python_work

                if not self._operations_per_second:
                    begun = time.monotonic()
                    python_work(1_000_000)
                    self._operations_per_second = 1_000_000 / (time.monotonic() - begun)
                operations = int(seconds * self._operations_per_second)
                return lambda: void(python_work(operations))
            case unknown:
                raise ValueError(f"no such computation: {unknown!r}")

    def _do_restore(self, order: dict[str, Any]) -> dict[str, Any]:
        from benchmarks.restoring import restore

        peer = self._peers.get("holdfast")
        checkpointer = getattr(peer, "checkpointer", None)
        return restore(
            order["how"],
            self.workload,
            checkpointer,
            order["source"],
            compare=order["compare"],
            meet=self.meet,
        )

    def _do_verify(self, order: dict[str, Any]) -> dict[str, Any]:
        return {"compared_bytes": self._peers[order["peer"]].verify()}

    def _do_compare(self, order: dict[str, Any]) -> dict[str, Any]:
        from benchmarks.complete import require_same
        from benchmarks.peers import load

        source = Path(order["source"])
        return {"compared_bytes": require_same(self.workload.state_dict(), load(source), what=source.name)}

    def _do_clean(self, order: dict[str, Any]) -> dict[str, Any]:
        self._peers[order["peer"]].clean()
        return {}

    def _do_collect(self, _: dict[str, Any]) -> dict[str, Any]:
        gc.collect()  # a full collection takes a quarter of a second of the peer that triggers it
        return {}

    def _do_drop(self, order: dict[str, Any]) -> dict[str, Any]:
        import ctypes

        self._peers.pop(order["peer"]).close()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # the next peer needs the memory that glibc would keep
        return {}

    def _do_gate(self, order: dict[str, Any]) -> dict[str, Any]:
        force_gate(coarse=order["coarse"])
        return {}

    def _do_update(self, order: dict[str, Any]) -> dict[str, Any]:
        from benchmarks.device_update import install

        install(self.workload, order["seconds"])
        return {}

    def _do_reset_peak(self, _: dict[str, Any]) -> dict[str, Any]:
        from benchmarks import memory

        return {"reset": memory.reset_peak()}

    def _do_memory(self, _: dict[str, Any]) -> dict[str, Any]:
        from benchmarks import memory

        return {
            "resident_bytes": memory.resident_bytes(),
            "peak_bytes": memory.peak_bytes(),
            "parameters": self.workload.parameters,
            "tensors": self.workload.tensors,
            "pid": os.getpid(),
        }

    def _do_close(self, _: dict[str, Any]) -> dict[str, Any]:
        for peer in self._peers.values():
            peer.close()
        return {}


def force_gate(*, coarse: bool) -> None:
    """Make holdfast's gate in this process wait for the whole copy, or layer by layer again."""
    from trainer_side.save import gate, split_step

    assert hasattr(gate, "split_step"), "the gate no longer calls `split_step`: force it in another way"
    gate.split_step = _whole_step if coarse else split_step.split_step


def _whole_step(optimizer: Any, _: Any, *, held: Any, wait_for_more: Any) -> None:
    """Replace `split_step`: update nothing until every parameter is copied."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    while any(map(held, parameters)):
        wait_for_more()


def void(_: object) -> None:
    """Discard the result of a computation."""


def main() -> None:
    """Run a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hub", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--store", required=True)
    arguments = parser.parse_args()
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"])  # torchrun sets the latter
    os.environ["RANK"] = str(rank)  # torch.distributed reads it; WORLD_SIZE is set for all
    link = Link(arguments.hub, job="ranks", rank=rank)
    obedient = _Rank(arguments, rank, int(os.environ["WORLD_SIZE"]))
    for order in link.orders():
        try:
            link.answer(obedient.obey(order))
        except Exception as error:  # noqa: BLE001 - or the hub would wait for minutes
            traceback.print_exc()
            link.answer({"error": f"{type(error).__name__}: {error}"})
    link.close()


if __name__ == "__main__":
    main()
