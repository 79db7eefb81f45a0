"""Rank 0 compares the replicas of all ranks, as the stager would, where no stager takes the step.

    copy thread of each rank ─ DONE: fingerprints ─► rank 0: all have come ─► the same ─► nothing
                                                                            └► they differ ─► ERROR, once; `divergence`
                                                                               └ refuse ─► VOID in every tier, to all

A rank sends its fingerprints before the first frame of its slice is ready, and so before it seals the slice in any
tier: no step is complete in a tier before it was compared.
"""

from __future__ import annotations

import logging
import threading

from holdfast.errors import StateError
from holdfast.image.layout import Layout
from holdfast.image.replicas import FIELD, Replicas
from holdfast.telemetry.events import EventLog
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind
from trainer_side.tiers.tier import Order

_log = logging.getLogger("holdfast.trainer.council")

_LAYOUT = "layout"
_LAYOUTS_KEPT = 4
_STEPS_MAX = 16  # of which not all ranks have said theirs; more than are ever in flight


def fingerprints_frame(order: Order, layout_digest: str, text: str) -> bytes:
    """The DONE message with the fingerprints of one rank."""
    attempt, step = order
    body = wire.to_json({FIELD: text, _LAYOUT: layout_digest})
    return wire.encode(Kind.DONE, attempt=attempt, step=step, body=body)


class ReplicaWatch:
    """See the module. The votes' thread of rank 0, except `laid_out`.

    Args:
        refuses: Whether a step of which the replicas differ is kept nowhere (`on_divergence=refuse`).
    """

    def __init__(self, ranks: int, events: EventLog, *, refuses: bool) -> None:
        self._ranks, self._events, self._refuses = ranks, events, refuses
        self._replicas = Replicas()
        self._guard = threading.Lock()
        self._layouts: dict[str, Layout] = {}
        self._said: dict[Order, dict[int, tuple[str, str]]] = {}  # rank → digest of its layout, fingerprints

    def laid_out(self, layout: Layout) -> None:
        """Slices of this layout come. Training thread."""
        with self._guard:
            self._layouts.pop(layout.digest, None)
            self._layouts[layout.digest] = layout
            while len(self._layouts) > _LAYOUTS_KEPT:
                del self._layouts[next(iter(self._layouts))]

    def hear(self, rank: int, frame: Frame) -> StateError | None:
        """Take the fingerprints of one rank. Returns why no tier may keep the step; None if there is no reason.

        Raises:
            ProtocolError: The message does not hold what it should.
        """
        body = wire.json_body(frame, **{FIELD: str, _LAYOUT: str})
        order = (frame.attempt, frame.step)
        said = self._said.setdefault(order, {})
        said[rank] = body[_LAYOUT], body[FIELD]
        if len(said) == self._ranks:
            for older in [other for other in self._said if other <= order]:
                del self._said[older]
            return self._compare(frame.step, said)
        if len(self._said) > _STEPS_MAX:
            del self._said[min(self._said)]
        return None

    def _compare(self, step: int, said: dict[int, tuple[str, str]]) -> StateError | None:
        digests = {digest for digest, _ in said.values()}
        with self._guard:
            layout = self._layouts.get(next(iter(digests)))
        if len(digests) > 1 or layout is None:
            return None  # `VoteCount` calls a step of several layouts void
        fingerprints = {rank: self._replicas.read(layout, text) for rank, (_, text) in said.items()}
        divergence = self._replicas.compare(layout, step, fingerprints)
        if divergence is None:
            return None
        if self._replicas.is_news(divergence):
            _log.error("%s", divergence.message)
            self._events.emit("divergence", divergence.to_json(), step=step)
        return StateError(divergence.message) if self._refuses else None
