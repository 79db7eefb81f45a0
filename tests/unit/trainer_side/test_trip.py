"""The number of product files that the training thread enters in `save()` and `restore()`.

A profile of real calls, with a simulated link. When a change shortens a path, lower the limit here.
"""

from __future__ import annotations

import ast
import logging
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import holdfast
import trainer_side
from holdfast.config import TrainerConfig
from tests.support import memory_store
from tests.support.memory_store import MemoryStore
from tests.unit.trainer_side import test_checkpointer
from tests.unit.trainer_side.restore.named import publish_named
from tests.unit.trainer_side.test_checkpointer import FakeLink
from trainer_side import joining
from trainer_side.checkpointer import Checkpointer
from trainer_side.link.job_state import JobState
from trainer_side.ranks.peers import LonePeers
from trainer_side.restore.restore import restore

PRODUCT = tuple(Path(str(package.__file__)).parent for package in (holdfast, trainer_side))
SAVE_ROOM = PRODUCT[1] / "save"
PLAYED = (memory_store.__file__, test_checkpointer.__file__)
LOG_HANDLERS = logging.__file__  # which a test before may have installed in this process
FIRST_SAVE_MAX = 35
LATER_SAVE_MAX = 20
RESTORE_MAX = 24
FLOORS_MAX = 6


def files_entered(function: Callable[[], object]) -> list[str]:
    """The product files of the functions that this thread calls meanwhile, in the order in which it enters them."""
    found: dict[str, None] = {}

    def entered(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and not _is_beside(frame):
            found.setdefault(frame.f_code.co_filename)

    sys.setprofile(entered)
    try:
        function()
    finally:
        sys.setprofile(None)
    return [_name(path) for path in map(Path, found) if any(root in path.parents for root in PRODUCT)]


def _is_beside(frame: FrameType | None) -> bool:
    """Whether it is off the way: in the body of a module that is imported, in a log handler, or played by the test."""
    while frame is not None and frame.f_code.co_filename != __file__:
        if frame.f_code.co_name == "<module>" or frame.f_code.co_filename in (*PLAYED, LOG_HANDLERS):
            return True
        frame = frame.f_back
    return False


def _name(path: Path) -> str:
    return "/".join(path.parts[-3:])


def _see(what: str, files: list[str], most: int) -> None:
    assert len(files) <= most, f"{what} enters {len(files)} files, expected at most {most}: {' '.join(files)}"


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeLink:
    found = FakeLink()
    found.job = JobState(0, 1, store_url=str(tmp_path), chunk_bytes=1 << 20, attempt=1)
    monkeypatch.setattr(joining, "connect_stager", found.meet)
    return found


def _state() -> tuple[dict[str, Any], torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "note": [1]}, optimizer


def test_a_save_enters_few_files(link: FakeLink) -> None:
    state, optimizer = _state()
    config = TrainerConfig(events=None, on_not_durable="warn", close_seconds_max=0.1)
    entered = []
    with Checkpointer(state, config=config) as checkpointer:
        checkpointer.restore()
        for step in range(4):
            entered.append(files_entered(lambda step=step: checkpointer.save(step)))  # type: ignore[misc]
            assert step in link.offers
            optimizer.step()
            link.bytes_of(step)
            link.stage(step)
    _see("the first save", entered[0], FIRST_SAVE_MAX)
    _see("a later save", entered[-1], LATER_SAVE_MAX)


def test_a_restore_of_a_small_file_enters_few_files(tmp_path: Path) -> None:
    state, fresh = ({"model": torch.nn.Linear(8, 8), "note": [note]} for note in (1, 2))
    publish_named(tmp_path, 3, state)
    store, peers = MemoryStore(), LonePeers()
    store.objects = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    entered = files_entered(lambda: restore(fresh, store, peers, events=None))
    assert fresh["note"] == [1]
    _see("restore()", entered, RESTORE_MAX)


def test_the_save_room_has_few_floors() -> None:
    """A floor is a file that is imported by the one above; what is imported for annotations alone does not count."""
    longest = max((_chain(path.stem) for path in SAVE_ROOM.glob("*.py")), key=len)
    assert len(longest) <= FLOORS_MAX, (
        f"{len(longest)} floors, expected at most {FLOORS_MAX}: {' > '.join(longest)}"
    )


@cache
def _chain(module: str) -> tuple[str, ...]:
    """The longest chain of imports within the room that begins with a module."""
    below = [_chain(other) for other in _imports(ast.parse((SAVE_ROOM / f"{module}.py").read_text()))]
    return (module, *max(below, key=len, default=()))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainer_side.save."):
            yield str(node.module).rpartition(".")[2]
