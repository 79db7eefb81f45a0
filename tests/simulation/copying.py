"""The copy thread of a rank, in worlds where copies may be torn: the real `Copier`, over tensors of our own.

    offer ─► Copier: batch, batch, … ─► a frame may go as soon as its batch is copied, and was found whole
               !  a change outside an update hits a tensor that is not copied yet: the copy is torn
               └─ found when that batch is read, or at the last look ─► the step is withdrawn, on all ranks

Torch is loaded when the first such world comes; other worlds do without. `Area` releases frames as
`trainer_side.save.staging.Staging` does, and `Instant` looks as `trainer_side.save.tearing.SavedInstant` does, but sees
every change: tests/unit/trainer_side/save/test_tearing.py covers which changes can be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from holdfast.telemetry.events import EventLog
from tests.simulation.runtime import SIM, install
from trainer_side.ledger import Ledger

if TYPE_CHECKING:
    from trainer_side.link.link import Link
    from trainer_side.save.copier import Copier
    from trainer_side.transfer import Transfer

_BATCH_SECONDS_MAX = 0.2
_PATH = "model/weight"


class FrameBatch(NamedTuple):
    """As `trainer_side.save.copy_plan.Batch`: one tensor for each frame."""

    offset: int
    end: int


@dataclass(frozen=True)
class FrameRoute:
    """As `trainer_side.save.copy_plan.Route`."""

    host: tuple[FrameBatch, ...]
    device: tuple[FrameBatch, ...] = ()
    storages: frozenset[int] = frozenset()


class Area:
    """One copy into one buffer.

    Args:
        data: The buffer, with the bytes of the saved instant.
        batches: Copied in this order.
        torn_before: Number of the batch before which a tensor is changed; -1: never.
        on_torn: Called when a tensor is changed that is not copied yet.
    """

    def __init__(
        self,
        data: bytearray,
        batches: Sequence[FrameBatch],
        torn_before: int,
        on_torn: Callable[[], None],
    ) -> None:
        self.memory, self.nbytes = data, len(data)
        self._batches, self._torn_before, self._on_torn = batches, torn_before, on_torn
        self._ready: set[int] = set()
        self._is_complete = False
        self.changed: FrameBatch | None = None

    def is_ready(self, offset: int) -> bool:
        return offset in self._ready

    def is_complete(self) -> bool:
        return self._is_complete

    def route(
        self, _sources: Sequence[Any], _update_order: Callable[[], Mapping[int, int]], *, order_changed: bool
    ) -> FrameRoute:
        """Return all batches as one route: the area is its own router."""
        assert order_changed is not None
        return FrameRoute(tuple(self._batches))

    @staticmethod
    def live_route(route: FrameRoute) -> FrameRoute:
        """Return the whole route: no batch is copied yet."""
        return route

    def discard(self) -> None:
        """Do nothing: no copy is under way."""

    def copy_gated(
        self,
        _sources: Sequence[Any],
        route: FrameRoute,
        *,
        after: Any,
        cancelled: Callable[[], bool],
        release: Callable[[Collection[int]], None],
        on_all_read: Callable[[], None],
        on_read: Callable[[Any], None],
        on_copied: Callable[[Any], None],
    ) -> None:
        assert after is None
        sim = SIM.now
        unread = len(route.host)
        for number, batch in enumerate(route.host):
            if cancelled():
                break
            sim.wait(None, sim.chance.random() * _BATCH_SECONDS_MAX, "copy a batch")
            if number == self._torn_before:
                self._tear(sim.chance.choice(route.host[number:]))
            on_read(batch)
            release(())
            unread -= 1
            if not unread:
                on_all_read()
            on_copied(batch)
            if not cancelled():
                self._ready.add(batch.offset)
        if unread or not route.host:
            on_all_read()
        self._is_complete = not cancelled()

    def _tear(self, batch: FrameBatch) -> None:
        """Change a tensor after `save()` and before its copy."""
        self.changed = batch
        for at in range(batch.offset, batch.end):
            self.memory[at] ^= 0x55
        self._on_torn()


class Instant:
    """The tensors at `save()`."""

    def __init__(self, area: Area, step: int) -> None:
        self._area, self.step, self.check = area, step, None

    def find_changed(self) -> str:
        """Path of a tensor that has changed, or ""."""
        return "" if self._area.changed is None else _PATH

    def find_changed_in(self, batch: FrameBatch) -> str:
        """As `find_changed`, for the tensors of this batch."""
        return _PATH if self._area.changed is batch else ""

    def find_miscopied(self, _batch: FrameBatch, _memory: bytearray) -> str:
        """Always "": the area holds the bytes as they were read."""
        return ""


def start_copier(link: Link, seconds_max: float) -> Copier:
    """Start the copy thread of the current process."""
    from trainer_side.save.copier import Copier  # with torch
    from trainer_side.save.hook_coverage import CopyPolicy

    install()  # the copier's modules were loaded just now
    ledger, events = Ledger(), EventLog(None, role="trainer")
    copy_policy = CopyPolicy(
        link.job.rank, mode="auto", inside_ms_max=0.0, send_doubt=lambda _: None, ledger=ledger, events=events
    )
    return Copier([], link, ledger=ledger, events=events, seconds_max=seconds_max, copy_policy=copy_policy)


def begin_copy(copier: Copier, transfer: Transfer, area: Area) -> None:
    """Begin a copy as the end of `Saver.save` does: the gate is shut, and the step is offered."""
    from trainer_side.save.copier import CopyJob
    from trainer_side.state.skeleton import Capture

    taken = Capture([], {}, None, (), [], ())
    played = cast(Any, area)
    copier.copy(
        CopyJob(
            transfer,
            played,
            played,
            taken,
            None,
            None,
            instant=cast(Any, Instant(area, transfer.step)),
        )
    )
