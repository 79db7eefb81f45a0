"""What a flusher that has kept our ring is told: all that the session knows, as if nobody had known it before.

    begin, chunk …, staged   for each checkpoint that is being received, or is staged, oldest first
    abort                    for each that only the ring still speaks of: given up while there was no flusher

The flusher takes what it knows already for said twice. It answers each begin with `began`, and each staged one sooner
or later with `durable` or `failed`; so none stays staged for ever because the word of it was lost.
"""

from __future__ import annotations

from holdfast.ring.ring import SlotState
from stager.flusher_line import FlusherLine
from stager.session.machine import Session
from stager.session.steps import FlusherBack

__all__ = ["replay"]


def replay(line: FlusherLine, session: Session) -> FlusherBack:
    """Tell the flusher, and say what the journal tells of the one before: slots whose word was lost."""
    ring, attempt = line.flusher.ring, line.flusher.attempt
    freed = tuple(slot for slot in sorted(session.flusher_slots) if ring.state(slot) is SlotState.FREE)
    known = session.known()
    for checkpoint in known:
        step = checkpoint.step
        line.send("begin", attempt=attempt, step=step, layout_digest=checkpoint.layout_digest)
        for slot in checkpoint.slots:
            if ring.state(slot) is SlotState.FULL:
                line.send("chunk", slot=slot)
        if checkpoint.staged:
            line.send("staged", attempt=attempt, step=step)
    steps = {checkpoint.step for checkpoint in known}
    for other, step in ring.checkpoint_names():
        if other == attempt and step not in steps and not session.is_durable(step):
            line.send("abort", attempt=attempt, step=step, reason="given up while there was no flusher")
    return FlusherBack(freed)
