"""Descriptors or inodes run out beside the ring: a staged checkpoint waits, and becomes durable later."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flusher import retry_queue
from flusher.engine import Engine
from flusher.recovery import adopt_staged, load_progress, resolve_checkpoints
from holdfast.errors import StoreError
from holdfast.ring.ring import Ring
from tests.unit.flusher.test_engine import FILE, IMAGE, KEY, Rig


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(retry_queue, "_PAUSE_SECONDS_FIRST", 0.001)
    monkeypatch.setattr(retry_queue, "_PAUSE_SECONDS_MAX", 0.002)
    made = Rig(tmp_path)
    yield made
    made.engine.stop()
    made.maintenance.stop()
    made.lease.end()
    made.inbox.close()
    made.events.close()
    made.ring.close()


class NoneLeft:
    """`os.open` of files whose name begins so fails the first `times` times."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int, prefix: str, times: int) -> None:
        self.left, self._open = times, os.open
        self._number, self._prefix = number, prefix
        patch.setattr(os, "open", self)

    def __call__(self, path: Any, *arguments: Any, **more: Any) -> int:
        if self.left > 0 and Path(str(path)).name.startswith(self._prefix):
            self.left -= 1
            raise OSError(self._number, os.strerror(self._number))
        return self._open(path, *arguments, **more)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC, errno.ENFILE])
@pytest.mark.parametrize("prefix", ["flush-", "checkpoint-"])
def test_a_staged_checkpoint_is_held_and_becomes_durable(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, prefix: str
) -> None:
    lacks = threading.Event()
    rig.store.before = lambda act, name: None if act != "write_part" else (lacks.wait(60), None)[1]
    rig.fill(IMAGE, 5)
    with monkeypatch.context() as patch:
        lacking = NoneLeft(patch, number, prefix, 4)
        lacks.set()
        rig.drain()
        assert lacking.left == 0
    assert rig.heard.failures == {}
    assert rig.store.objects[FILE] == IMAGE.final
    assert rig.happened(tmp_path, "flush_held") >= 1
    assert rig.all_free()


def settle_it(engine: Engine, ring: Ring) -> None:
    resolve_checkpoints(engine, ring, "its stager ended")


@pytest.mark.parametrize("act", [adopt_staged, load_progress, settle_it])
def test_a_start_that_cannot_look_gives_nothing_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, act: Any
) -> None:
    rig.fill(IMAGE, 5, tell=False)
    with monkeypatch.context() as patch:
        NoneLeft(patch, errno.EMFILE, "checkpoint-", 99)
        NoneLeft(patch, errno.EMFILE, "flush-", 99)
        with pytest.raises(StoreError, match="open files"):
            act(*((rig.ring,) if act is load_progress else (rig.engine, rig.ring)))
    assert rig.ring.checkpoint(*KEY) is not None, "it waits for the next start"
    adopt_staged(rig.engine, rig.ring)
    rig.drain()
    assert rig.store.objects[FILE] == IMAGE.final
    assert rig.heard.failures == {}
