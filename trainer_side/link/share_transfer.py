"""One checkpoint of this rank in flight to several stagers, each of which receives a share.

    stager 1/3   SENDING ─► SENT ─► STAGED ─► DURABLE ─┐
    stager 2/3   SENDING ─► FAILED ────────────────────┼─► one transfer, as the rest of the rank sees it
    stager 3/3   SENDING ─► SENT ─► STAGED ────────────┘

    STAGED, and the memory is free     when every share is staged: until then any of them may fail
    DURABLE                            when the lead says so: its flusher publishes the file
    DECLINED, FAILED                   when one share is; the other stagers are told, since no checkpoint can be whole
    a stager is lost                   once every share is staged, only the lead's loss matters

A share whose stager is lost is held: its memory stays in use until the stager's next process is reached and the share
is offered again. A small image has one share, the lead's, which is not held, as with a single stager.

Each stager's link changes its share in a thread of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from holdfast.image.save_record import SaveRecord
from holdfast.telemetry.causes import DeclineCause, Reason
from trainer_side.transfer import SliceSource, Transfer, TransferState

_PROGRESS = (
    TransferState.OFFERED,
    TransferState.SENDING,
    TransferState.SENT,
    TransferState.STAGED,
    TransferState.DURABLE,
)


class ShareTransfer(Transfer):
    """The share of one stager.

    Attributes:
        was_sent: The whole share was sent.
        in_doubt: The stager was lost after that.
        held: The stager is lost, and the share waits for its next process.
    """

    is_share: ClassVar[bool] = True

    def __init__(self, whole: WholeTransfer, index: int) -> None:
        # The lead writes the manifest, so only the lead gets the times and the fingerprints of this save.
        own = SaveRecord(saved_at_unix=whole.transfer.record.saved_at_unix)
        super().__init__(whole.transfer.step, whole.transfer.record if index == 0 else own)
        self.index, self._whole = index, whole
        self.was_sent = self.in_doubt = self.held = False

    def set_state(self, state: TransferState, reason: Reason | None = None) -> None:
        super().set_state(state, reason)
        self.was_sent = self.was_sent or state in (TransferState.SENT, TransferState.STAGED)
        self._whole.on_share_changed()

    @property
    def is_reported_elsewhere(self) -> bool:
        """The lead reports a step of which every share is staged: the flushers need neither ranks nor stagers."""
        return self.index > 0 and self._whole.transfer.state is TransferState.STAGED

    def hold(self) -> bool:
        with self._whole.frozen_open_state() as is_open:
            if not is_open or len(self._whole.shares) == 1 or self.state.is_final:
                return False
            self.state, self.in_doubt, self.held = TransferState.OFFERED, self.was_sent, True
            self.settled.clear()
            return True

    def reoffer(self) -> SliceSource | None:
        with self._whole.frozen_open_state() as is_open:
            if not is_open or self.state.is_final:
                return None
            self.held = False
            self.released.clear()
            return self._whole.source

    def release(self) -> None:
        super().release()
        self._whole.on_share_changed()

    def final_message(self) -> dict[str, Any]:
        return self._whole.transfer.final_message() if self.index == 0 else super().final_message()


class WholeTransfer:
    """Combines the shares of one checkpoint into one transfer.

    Args:
        transfer: The transfer as the rest of the rank sees it.
        count: How many stagers have a share.
        on_changed: Called in a link's thread when a share has changed, with this object and the state that `transfer`
            has thereby reached, if any.
        source: The memory of this rank's slice.

    Attributes:
        shares: One per stager, the lead's first.
    """

    def __init__(
        self,
        transfer: Transfer,
        count: int,
        on_changed: Callable[[WholeTransfer, TransferState | None], None],
        source: SliceSource | None = None,
    ) -> None:
        self.transfer, self._on_changed, self.source = transfer, on_changed, source
        self._lock = threading.RLock()  # `on_changed` may end another share in the same thread
        self.shares = [ShareTransfer(self, index) for index in range(count)]

    @property
    def ended_share(self) -> ShareTransfer | None:
        """The share because of which the whole is declined, or has failed."""
        ended = (TransferState.DECLINED, TransferState.FAILED)
        return next((share for share in self.shares if share.state in ended), None)

    @property
    def is_durable(self) -> bool:
        """Whether the lead has reported DURABLE, regardless of the other shares."""
        return self.shares[0].state is TransferState.DURABLE

    @contextlib.contextmanager
    def frozen_open_state(self) -> Iterator[bool]:
        """Yield whether the whole is neither staged nor given up, so its memory is kept; fixed during the block."""
        with self._lock:
            yield not self.transfer.settled.is_set()

    def on_share_changed(self) -> None:
        """Update the whole, after a share has reached another state or released its memory."""
        with self._lock:
            transfer, before = self.transfer, self.transfer.state
            transfer.frames = sum(share.frames for share in self.shares)
            transfer.frames_left = sum(share.frames_left for share in self.shares)
            self._combine()
            if transfer.settled.is_set() and all(share.released.is_set() for share in self.shares):
                self.source = None  # keep no staging area that is not read any more
                transfer.release()
            # Under the lock, so that `fail_held` returns after it.
            self._on_changed(self, transfer.state if transfer.state is not before else None)

    def fail_held(self) -> None:
        """Fail the shares that wait for a lost stager. Any thread.

        Returns once `on_changed` has been called for all states reached so far.
        """
        with self._lock:
            for share in self.shares:
                if share.held:
                    reason = DeclineCause.UNKNOWN.because("its stager was lost, and this rank leaves")
                    share.set_state(TransferState.FAILED, reason)

    def _combine(self) -> None:
        transfer, ended = self.transfer, self.ended_share
        if transfer.state.is_final:
            return
        if self.is_durable:
            transfer.set_state(TransferState.DURABLE)
            return
        if ended is not None:
            transfer.set_state(ended.state, ended.reason)
            return
        progress = [_PROGRESS.index(share.state) for share in self.shares]
        least = _PROGRESS[min(progress)]
        if least in (TransferState.STAGED, TransferState.DURABLE):
            reached = TransferState.STAGED
        elif least is TransferState.SENT:
            reached = TransferState.SENT
        else:
            # A held share is OFFERED again, which the whole never is.
            has_begun = max(progress) > 0 or transfer.state is not TransferState.OFFERED
            reached = TransferState.SENDING if has_begun else TransferState.OFFERED
        if reached is not transfer.state:
            transfer.set_state(reached)
