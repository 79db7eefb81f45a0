"""Host memory that is made ahead of its first use, by a thread of its own, one piece after the other.

    a new layout ─► thread: slot 0 ═══►│ slot 1 ═══►│ slot 2 …          locked for the device meanwhile training goes on
    save()            take(slot 0): waits for that one        take(slot 2): not begun, so it is made here at once

A piece that is under way when nobody wants it any more (another layout, the end of the job) is given back when it is
done: nobody waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch

from trainer_side.save.device_lane import enter_thread
from trainer_side.state.accelerator import own_device

Make = Callable[[], torch.Tensor]


class MemoryAhead:
    """See the module. Training thread.

    Args:
        makes: Key → how the memory is made, in the order of their use; called in any thread.
    """

    def __init__(self, makes: Mapping[int, Make]) -> None:
        self._lock = threading.Lock()
        self._unbegun = dict(makes)
        self._begun: dict[int, Future[torch.Tensor]] = {}
        self._thread: threading.Thread | None = None
        if makes:
            self._thread = threading.Thread(target=self._run, name="holdfast-memory", daemon=True)
            self._thread.start()

    def take(self, key: int) -> torch.Tensor | None:
        """The memory of this key, once; waits for it if the thread is at it. None: there is no such key.

        Raises:
            Exception: What making it raised.
        """
        with self._lock:
            make, begun = self._unbegun.pop(key, None), self._begun.pop(key, None)
        if make is not None:
            return make()
        return None if begun is None else begun.result()

    def stop(self) -> None:
        """Begin nothing more, and give back what was made and not taken."""
        with self._lock:
            self._unbegun.clear()
            self._begun.clear()

    def close(self, seconds_max: float) -> None:
        """`stop`, and wait for the piece that is under way, at most so long."""
        self.stop()
        if self._thread is not None:
            self._thread.join(seconds_max)

    def _run(self) -> None:
        if (device := own_device()) is not None:
            enter_thread(device)  # and so no graph that training records is ended by a lock
        while (made := self._next()) is not None:
            make, future = made
            try:
                future.set_result(make())
            except BaseException as error:  # noqa: BLE001 - raised by whoever takes it
                future.set_exception(error)
            del made, make, future  # nobody else may want it

    def _next(self) -> tuple[Make, Future[torch.Tensor]] | None:
        with self._lock:
            if not self._unbegun:
                return None
            key = next(iter(self._unbegun))
            self._begun[key] = Future()
            return self._unbegun.pop(key), self._begun[key]
