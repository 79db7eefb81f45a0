"""One checkpoint of this rank in flight to the stager: its state, and its times.

    OFFERED ─► SENDING ─► SENT ─► STAGED ─► DURABLE
       └───────────┴────────┴── DECLINED (never begun, or given up by agreement) or FAILED

The link's thread changes it; any thread may read it or wait for its events.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Protocol

from holdfast.image.replicas import FIELD
from holdfast.image.save_record import SaveRecord
from holdfast.telemetry.causes import Reason


class TransferState(Enum):
    OFFERED = "offered"
    SENDING = "sending"
    SENT = "sent"
    STAGED = "staged"
    DURABLE = "durable"
    DECLINED = "declined"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """Whether no other state follows."""
        # A tuple: the hash of an enum is Python code, and this is asked at each turn.
        return self in (TransferState.DURABLE, TransferState.DECLINED, TransferState.FAILED)


class SliceSource(Protocol):
    """The memory of this rank's bytes: each of `frames_of(layout, rank)` at its offset, contiguous."""

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of the buffer; read by the link's thread until the transfer is released."""
        ...

    def is_ready(self, offset: int) -> bool:
        """Whether all bytes of the frame that begins at `offset` are in place. Called from the link's thread."""
        ...

    def is_complete(self) -> bool:
        """Whether all frames are in place and the save's record is complete, even if this rank has no frames."""
        ...


@dataclass(eq=False)
class Transfer:
    """One offered checkpoint."""

    step: int
    record: SaveRecord  # all `*_seconds` of phases count from the save
    state: TransferState = TransferState.OFFERED
    reason: Reason | None = None  # why it was declined or failed; None before that, and without a stager
    fingerprints: str = ""  # of this rank's replicas, for DONE; set before the last byte is ready
    frames: int = 0  # that this rank sends
    frames_left: int = 0  # that it has not sent yet
    released: threading.Event = field(default_factory=threading.Event)  # the source is not read any more
    settled: threading.Event = field(default_factory=threading.Event)  # staged, declined or failed
    ended: threading.Event = field(default_factory=threading.Event)  # durable, declined or failed

    # Whether it is a part of another transfer, which stands for it in the event log.
    is_share: ClassVar[bool] = False

    @classmethod
    def not_sent(cls, step: int, record: SaveRecord, reason: Reason | None = None) -> Transfer:
        """A finished transfer for a step that is not sent to the stager."""
        transfer = cls(step, record, TransferState.DECLINED, reason)
        for event in (transfer.released, transfer.settled, transfer.ended):
            event.set()
        return transfer

    def set_state(self, state: TransferState, reason: Reason | None = None) -> None:
        """Note that the transfer is in `state`. Link's thread, or before the transfer is handed over."""
        if self.state.is_final:
            return
        self.reason = reason
        self.state = state
        if self.record.saved_at_unix is not None:
            setattr(self.record, f"{state.value}_seconds", max(0.0, time.time() - self.record.saved_at_unix))
        if state is TransferState.STAGED or state.is_final:
            self.settled.set()
        if state.is_final:
            self.ended.set()

    @property
    def is_reported_elsewhere(self) -> bool:
        """Whether another stager than this transfer's says how the step ends. Link's thread."""
        return False

    def hold(self) -> bool:
        """Keep the transfer for the next process of its lost stager; return whether it is kept. Link's thread."""
        return False

    def reoffer(self) -> SliceSource | None:
        """Return the memory to send once more, after `hold`; None if the step has ended. Link's thread."""
        return None

    def release(self) -> None:
        """Note that the source is not read any more. Threads as for `set_state`."""
        self.released.set()

    def final_message(self) -> dict[str, Any]:
        """Return the body of the message to the stager after the last frame."""
        body = self.record.to_json()
        if self.fingerprints:
            body[FIELD] = self.fingerprints
        return body
