"""One rank that passes odd arguments to the API: `python doors.py OUT CASE…`; prints the result of each case."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.config import TrainerConfig
from holdfast.errors import HoldfastError
from tests.support.no_compiler import do_without_compiler
from trainer_side import Checkpointer, PerRank


class Headed(torch.nn.Module):
    """A module with extra state in bytes, as in some libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(300))
        self.head = b"not empty"

    def get_extra_state(self) -> bytes:
        return self.head

    def set_extra_state(self, state: bytes) -> None:
        self.head = state


def numbers(checkpointer: Checkpointer, _: dict[str, Any]) -> None:
    wrongs: tuple[Any, ...] = (2.5, torch.tensor(4.0), torch.tensor([4]), 2**64, -1, True, "7", None)
    for wrong in wrongs:
        for call in (checkpointer.save, checkpointer.step):
            try:
                print("taken", wrong, call(wrong))
            except HoldfastError as error:
                print("refused", type(error).__name__, str(error).partition(" (")[0])
    steps: tuple[Any, ...] = (3, np.int64(4), torch.tensor(5), np.array(6))
    for step in steps:
        print("saved", checkpointer.save(step))
        checkpointer.wait_copied()
        while checkpointer.kept_step < int(step):
            time.sleep(0.01)


def emptied(checkpointer: Checkpointer, state: dict[str, Any]) -> None:
    checkpointer.save(0)
    wait_kept(checkpointer, 0)
    state["model"].head = state["own"].value["head"] = b""
    checkpointer.save(1)


def odd(checkpointer: Checkpointer, state: dict[str, Any]) -> None:
    checkpointer.save(0)
    wait_kept(checkpointer, 0)
    with torch.inference_mode():
        state["inferred"].add_(1)
        state["judge"].weight.mul_(3)
    checkpointer.save(1)


def second(checkpointer: Checkpointer, state: dict[str, Any]) -> None:
    checkpointer.save(0)
    try:
        Checkpointer(state)
    except HoldfastError as error:
        print("beside", type(error).__name__, error)
    wait_kept(checkpointer, 0)
    print("saved", checkpointer.save(1))


def forked(checkpointer: Checkpointer, state: dict[str, Any]) -> None:
    """Children that step, save, close, leave the block, train, and end in different ways."""
    loader = torch.utils.data.DataLoader(Asking(checkpointer), num_workers=1, multiprocessing_context="fork")
    print("worker", [text[0] for text in loader])
    for how in ("close", "leave", "exit", "error"):
        child = os.fork()
        if child == 0:
            in_child(how, checkpointer, state)
        print("child", how, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print("saved", checkpointer.save(1))


def in_child(how: str, checkpointer: Checkpointer, state: dict[str, Any]) -> None:
    do_without_compiler()
    optimizer = torch.optim.SGD(state["model"].parameters())
    optimizer.step()
    if how == "close":
        checkpointer.close()
        os._exit(0)
    if how == "leave":
        checkpointer.__exit__(None, None, None)
        os._exit(0)
    if how == "error":
        sys.excepthook = lambda *_: None
        checkpointer.step(7)
    sys.exit(0)  # runs the parent's exit handlers, too


class Asking(torch.utils.data.Dataset[str]):
    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> str:
        said = []
        for call in (self._checkpointer.step, self._checkpointer.save):
            try:
                call(5)
            except HoldfastError as error:
                said.append(f"{type(error).__name__} {error}")
        self._checkpointer.close()
        return "; ".join(said)


def wait_kept(checkpointer: Checkpointer, step: int) -> None:
    while checkpointer.kept_step < step:
        time.sleep(0.01)


CASES = {"numbers": numbers, "emptied": emptied, "odd": odd, "second": second, "forked": forked}


def made() -> dict[str, Any]:
    with torch.inference_mode():
        judge = torch.nn.Linear(4, 4)
        judge.weight.fill_(1)
        inferred = torch.ones(5)
    bits = torch.zeros(8, dtype=torch.uint8).view(torch.bits8)
    own = PerRank({"head": b"not empty", "bits": torch.zeros(8, dtype=torch.uint8).view(torch.bits8)})
    return {"model": Headed(), "own": own, "inferred": inferred, "judge": judge, "bits": bits}


def main() -> None:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a forked child has what is not written
    torch.use_deterministic_algorithms(True)
    for case in sys.argv[2:]:
        print("case", case)
        play(case, Path(sys.argv[1]) / case)


def play(case: str, out: Path) -> None:
    out.mkdir()
    config = TrainerConfig(tiers=(f"file:{out / 'tier'}",), store=str(out / "store"), close_seconds_max=30)
    state = made()
    with Checkpointer(state, config=config) as checkpointer:
        checkpointer.restore()
        CASES[case](checkpointer, state)
    kept = checkpointer.kept_step
    again = made()
    with Checkpointer(again, config=config) as checkpointer:  # after the first is closed
        print("next", checkpointer.restore(), kept)
        print("back", again["model"].head, again["own"].value["head"])
        print("inferred", again["inferred"].tolist(), again["judge"].weight.unique().tolist())
    print("done")


if __name__ == "__main__":
    main()
