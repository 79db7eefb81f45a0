"""Helpers for tests of the stager's session: a layout, a driver for the session, and its inner state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.image.entries import REPLICATED, Entry
from holdfast.image.layout import Layout
from holdfast.wire.frames import Kind
from stager.session.checkpoint import Phase
from stager.session.session import Session
from stager.session.session_messages import (
    Action,
    Began,
    Event,
    GrantCredit,
    NewLayout,
    Offer,
    Received,
    SendMessage,
    Sent,
)

CHUNK = 4096


def make_layout(chunks: int = 6, ranks: int = 2, *, last_owner: int = REPLICATED) -> Layout:
    nbytes = chunks * CHUNK - 100
    entries = (
        Entry("a", 64, nbytes - 400, REPLICATED, ()),
        Entry("b", nbytes - 300, 100, last_owner, ()),
    )
    return Layout(nbytes, CHUNK, ranks, entries)


def is_empty(session: Session) -> bool:
    """Whether nothing is in flight, and every staged checkpoint is durable or failed."""
    return not session._open


def phases_of(session: Session) -> dict[int, Phase]:
    return {step: checkpoint.phase for step, checkpoint in session._open.items()}


def slots_of(session: Session) -> tuple[set[int], set[int], set[int]]:
    """Return the slots that are free, being filled, and held by the flusher."""
    assert len(session._slots.free) == len(set(session._slots.free)), "a slot is free twice"
    filling = {slot for checkpoint in session._open.values() for slot in checkpoint.open_slots.values()}
    return set(session._slots.free), filling, set(session._slots.flusher_slots)


class Stager:
    """Drives a session and records its actions, with a manual clock."""

    def __init__(
        self,
        layout: Layout,
        *,
        slots: int = 8,
        share: range | None = None,
        left: Mapping[int, bool] | None = None,
    ) -> None:
        self.layout = layout
        self.now = 0.0
        self.session = Session(
            ranks=layout.ranks,
            free_slots=range(slots),
            offer_seconds_max=60,
            chunk_seconds_max=120,
            share=None if share is None else lambda _: share,
        )
        self.session.take_over(left or {})
        self.credits: dict[tuple[int, int, int], int] = {}
        self.done: list[Action] = []
        self.take(NewLayout(layout))

    def take(self, event: Event) -> list[Action]:
        actions = self.session.handle(event, self.now)
        self.done += actions
        for action in actions:
            if isinstance(action, GrantCredit):
                self.credits[action.rank, action.step, action.chunk] = action.slot
        return actions

    def offer_all(self, step: int, *, began: bool = True) -> list[Action]:
        for rank in range(self.layout.ranks):
            actions = self.take(Offer(rank, step, self.layout.digest))
        return self.take(Began(step)) if began else actions

    def take_began(self, step: int, part_chunks: int) -> list[Action]:
        return self.take(Began(step, part_chunks))

    def pay(self, rank: int, step: int, chunk: int) -> list[Action]:
        """Let the rank answer a credit correctly."""
        del self.credits[rank, step, chunk]
        nbytes = sum(extent.nbytes for extent in self.layout.pieces(chunk, rank))
        self.take(Sent(rank, step, chunk, nbytes, 1000 * rank + chunk))
        return self.take(Received(rank, step, chunk))

    def pay_all(self, step: int) -> None:
        while due := [credit for credit in self.credits if credit[1] == step]:
            self.pay(*due[0])

    def said(self, kind: Kind) -> list[SendMessage]:
        return [action for action in self.done if isinstance(action, SendMessage) and action.kind is kind]

    def of(self, kind: type[Action]) -> list[Any]:
        return [action for action in self.done if isinstance(action, kind)]
