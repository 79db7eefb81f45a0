"""Handles the flusher's messages in the stager, and attaches a new flusher when the old one has ended.

    began, freed, grown, durable, failed ─► events of the session
    the flusher is lost ─► uploads that cannot be resumed fail their step ─► another flusher is found
                              ├─ with our ring: it is told what the session knows; the trainers notice nothing
                              └─ with another ring: steps are refused until no credit is out into the old ring

Where the flusher's messages and the journal disagree, the journal is right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from holdfast.errors import PeerLost, ProtocolError
from holdfast.faultpoint import Point, reach
from holdfast.ring.journal import SlotState
from holdfast.ring.ring import Ring
from stager.actions import Actions
from stager.flusher_line import FlusherConnection
from stager.flusher_process import Flusher
from stager.payloads import Payloads
from stager.session.session import Session
from stager.session.session_messages import (
    Began,
    Durable,
    Failed,
    FlusherLost,
    FlusherReplaced,
    SlotsAdded,
    SlotsFreed,
)


def replay(line: FlusherConnection, session: Session) -> FlusherReplaced:
    """Tell the flusher what the session knows; return the slots that the last flusher freed without a message."""
    ring, attempt = line.flusher.ring, line.flusher.attempt
    freed = tuple(slot for slot in sorted(session.flusher_slots) if ring.state(slot) is SlotState.FREE)
    known, inherited = session.known(), _inherited_slots(ring, attempt, session)
    for checkpoint in known:
        step = checkpoint.step
        line.send("begin", attempt=attempt, step=step, layout_digest=checkpoint.layout_digest)
        for slot in (*checkpoint.slots, *inherited.get(step, ())):
            if ring.state(slot) is SlotState.FULL:
                line.send("chunk", slot=slot)
        if checkpoint.staged:
            line.send("staged", attempt=attempt, step=step)
    steps = {checkpoint.step for checkpoint in known} | session.inherited_staged
    for other, step in ring.checkpoint_ids():
        if other == attempt and step not in steps and not session.is_durable(step):
            line.send("abort", attempt=attempt, step=step, reason="given up while there was no flusher")
    return FlusherReplaced(freed)


def _inherited_slots(ring: Ring, attempt: int, session: Session) -> dict[int, list[int]]:
    """Return the slots with chunks that the previous stager received, by step. The flusher has freed later copies."""
    found: dict[int, list[int]] = {}
    for slot in session.inherited_slots:
        try:
            record = ring.record(slot)
        except ProtocolError:
            continue  # the flusher's to report
        if record.attempt == attempt:
            found.setdefault(record.step, []).append(slot)
    return found


_log = logging.getLogger("holdfast.stager")


class FlusherHandler:
    """Handles the job's flushers in turn. Only for the loop's thread. `resend`: sends doubts and proofs again."""

    def __init__(
        self,
        line: FlusherConnection,
        session: Session,
        payloads: Payloads,
        actions: Actions,
        resend: Callable[[], None],
    ) -> None:
        self._line, self._session, self._payloads, self._actions = line, session, payloads, actions
        self._resend = resend
        self._next: Flusher | None = None  # has another ring; attached once no credit is out into this one
        self.drained = False

    def close(self) -> None:
        if self._next is not None:
            self._next.close()
        self._line.close()

    def poll(self) -> bool:
        """Handle the flusher's messages, or its end; whether there were messages."""
        messages = self._line.poll()
        try:
            for message in messages:
                self._handle_message(message.kind, message.fields)
        except ProtocolError as error:
            self._line.disconnect(error)
        if not self.drained and self._line.check_exited():
            self._fail_stranded()
            self._actions.process(FlusherLost(self._line.lost_reason))
        return bool(messages)

    def _handle_message(self, kind: str, fields: dict[str, Any]) -> None:
        if "step" in fields and fields["attempt"] != self._line.flusher.attempt:
            return  # about a checkpoint of the previous job
        match kind:
            case "began":
                self._actions.process(Began(fields["step"], fields["part_chunks"]))
            case "freed":
                self._handle_freed(fields["slots"])
            case "grown":
                reach(Point.GROWTH_HEARD)
                self._handle_grown(fields["note"])
            case "durable":
                body = {"pgt2_seconds": fields["pgt2_seconds"], "file": fields["file"]}
                _log.info("step %d is durable: %s", fields["step"], fields["file"])
                self._line.reset_failures()
                self._actions.process(Durable(fields["step"], body))
            case "failed":
                self._actions.process(Failed(fields["step"], fields["code"], fields["message"]))
            case "bad":
                _log.error(
                    "step %d was read back from the store and is damaged: %s", fields["step"], fields["note"]
                )
            case "verified":
                note = str(fields.get("note", ""))  # names tensors with NaN or infinity
                if note:
                    _log.warning("step %d was read back and is as it was saved, but %s", fields["step"], note)
                else:
                    _log.info("step %d was read back from the store and is good", fields["step"])
            case "held":
                self._handle_held(fields["message"])
            case "drained":
                self.drained = True
            case _:
                raise ProtocolError(f"message {kind} is not expected from the flusher here")

    def _handle_held(self, message: str) -> None:
        """Log a store failure here too: nobody reads the flusher's log file while the job runs."""
        if message and not self._line.held:
            _log.error(
                "store unavailable: %s. Staged checkpoints wait in the ring; when it is full, newer steps "
                "replace older ones or are skipped. The flusher's log: %s",
                message,
                self._line.log_path,
            )
        elif not message:
            _log.warning("the store takes checkpoints again")
        self._line.held = message

    def _handle_freed(self, slots: list[int]) -> None:
        """Pass on freed slots. `replay` may have found some free already, so a slot is believed only if the journal
        says FREE and it is still the flusher's.
        """
        ring, flusher_slots = self._line.flusher.ring, self._session.flusher_slots
        out_of_range = [slot for slot in slots if not 0 <= slot < ring.ring_chunks]
        if out_of_range:
            raise ProtocolError(f"the flusher freed slots {out_of_range}; the ring has {ring.ring_chunks}")
        freed = tuple(slot for slot in slots if slot in flusher_slots and ring.state(slot) is SlotState.FREE)
        if freed:
            self._line.reset_failures()
            self._actions.process(SlotsFreed(freed))

    def _handle_grown(self, note: str) -> None:
        ring = self._line.flusher.ring
        slots = ring.refresh_slots()
        if slots:
            self._payloads.grow(ring, slots)
            self._actions.process(SlotsAdded(tuple(slots)))
        if note:
            _log.info("%s", note)

    def _fail_stranded(self) -> None:
        """Fail each unstaged step whose chunks left the ring in an upload that has no progress record."""
        flusher = self._line.flusher
        for known in self._session.known():
            in_ring = sum(flusher.ring.state(slot) is SlotState.FULL for slot in known.slots)
            in_upload = known.handed_over - in_ring
            if known.staged or not in_upload or flusher.ring.has_progress(flusher.attempt, known.step):
                continue
            lost = PeerLost(
                f"step {known.step}: the flusher (process {flusher.pid}) ended with {in_upload} chunks of it in an "
                "upload that no other process can resume; make the ring larger than the image, or use a store whose "
                "uploads can be resumed"
            )
            self._actions.process(Failed(known.step, lost.code, str(lost)))

    def reattach(self) -> None:
        """Attach another flusher once it is found: with our ring at once, with a new ring when no credit is out.

        PeerLost: it has a new ring, and other stagers still have the old attempt.
        """
        if self._next is None:
            found = self._line.poll_replacement()
            if found is None:
                return
            if found.resumed:
                self._line.switch_to(found)
                # The last flusher may have ended after its journal entry and before its message.
                self._handle_grown("")
                self._actions.process(replay(self._line, self._session))
                self._resend()
                return
            if self._line.leads_others:
                found.close()
                raise PeerLost(
                    f"the flusher (process {self._line.flusher.pid}) ended, and its ring could not be kept; the next "
                    "one has another attempt than the other stagers of this job, so the ranks must come again"
                )
            self._next = found
            self._actions.execute(
                self._session.refuse_all(
                    f"the flusher (process {self._line.flusher.pid}) ended, and its ring could not be kept; staged "
                    "steps that are whole in it are published, the rest is given up"
                )
            )
        if not self._session.outstanding():
            self._switch_ring(self._next)
            self._next = None

    def _switch_ring(self, flusher: Flusher) -> None:
        """Switch to a flusher that has another ring; no payload is in flight into the old one."""
        self._payloads.set_ring(flusher.ring)
        self._line.switch_to(flusher)
        free_slots, flusher_slots = slot_owners(flusher.ring)
        self._session.reopen(free_slots=free_slots, flusher_slots=flusher_slots)
        self._resend()


def slot_owners(ring: Ring) -> tuple[list[int], list[int]]:
    """Return the free slots and the flusher's. Free slots without chunks for a restore come first, then the oldest."""
    flusher_slots = [slot for slot in range(ring.ring_chunks) if ring.state(slot) is not SlotState.FREE]
    held = {record.slot: (record.attempt, record.step) for record in ring.remains()}
    free_slots = set(range(ring.ring_chunks)).difference(flusher_slots)
    return sorted(free_slots, key=lambda slot: (held.get(slot, (0, 0)), slot)), flusher_slots
