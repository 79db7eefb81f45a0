"""The flusher's loop ends when all is done, whichever moment the last of it is done at."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import pytest

from flusher.service import Service
from flusher.tenure import Tenure
from flusher.upkeep import Upkeep
from flusher.workers import Inbox
from holdfast.config import FlusherConfig
from holdfast.events import EventLog
from holdfast.ipc import SOCKET_NAME, VERSION, Listener, connect
from holdfast.ring import Ring
from tests.support.memory_store import MemoryStore

SECONDS_MAX = 10


class LateUpkeep(Upkeep):
    """Reading back ends just after the loop has looked whether it has, and its last word is taken in the same turn."""

    service: Service
    _over = False

    @property
    def idle(self) -> bool:
        return self._over

    def give_way(self, busy: bool) -> None:
        super().give_way(busy)
        self._over = self.service.desk is not None and self.service.desk.finishing


@pytest.mark.timeout(30)
def test_work_that_ends_between_two_looks_does_not_leave_the_loop_asleep(tmp_path: Path) -> None:
    store = MemoryStore()
    config = FlusherConfig(store="memory://run", chunk_bytes=4096, ring_bytes=8 * 4096, grace_seconds=0)
    said: list[str] = []
    with contextlib.ExitStack() as held:
        ring = Ring.create(tmp_path / "run", chunk_bytes=4096, ring_chunks=8, attempt=1)
        held.callback(ring.close)
        inbox = Inbox()
        held.callback(inbox.close)
        tenure = Tenure(store, config.heartbeat_seconds)
        held.callback(tenure.end)
        upkeep = LateUpkeep(store, tenure, inbox, verify=False, keep_last=0, keep_every=0)
        held.callback(upkeep.stop)
        listener = Listener(tmp_path / "run" / SOCKET_NAME)
        held.callback(listener.close)
        service = Service(
            config,
            ring,
            store,
            tenure,
            upkeep=upkeep,
            inbox=inbox,
            listener=listener,
            events=EventLog(None, role="flusher"),
        )
        upkeep.service = service

        def stager() -> None:
            channel = connect(tmp_path / "run" / SOCKET_NAME)
            channel.send("hello", version=VERSION, pid=1)
            deadline = time.monotonic() + SECONDS_MAX
            while "drained" not in said and time.monotonic() < deadline and not channel.closed:
                for message in channel.poll():
                    said.append(message.kind)
                    if message.kind == "welcome":
                        channel.send("finish")
                        threading.Timer(0.2, inbox.put, [None]).start()  # the read-back's last word
                time.sleep(0.01)
            channel.close()  # would wake a loop that is asleep, but then nobody was told `drained`

        thread = threading.Thread(target=stager)
        thread.start()
        service.run()
        thread.join()
    assert said == ["welcome", "drained"]
