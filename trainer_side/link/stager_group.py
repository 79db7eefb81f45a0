"""Several stagers as one, each with a share of every checkpoint: the links of a rank to them, the lead's first.

    offer, decline ──► every stager with a share        agree, send_message ──► the lead alone
    a share is declined or fails ──► give up the step, and tell the other stagers why
    a stager is lost ──► no checkpoint is taken until it is reached again; unstaged shares are then offered to it again
    the lead begins another attempt, or is lost for too long ──► leave the others, whose attempt is the lead's

A rank that loses a stager after sending it the whole share tells the others nothing: the share may be staged there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from holdfast.errors import HoldfastError, PeerLost
from holdfast.image.layout import Layout
from holdfast.image.save_record import SaveRecord
from holdfast.image.shares import Shares
from holdfast.process import at_exit
from holdfast.ring.remains import FetchKind
from holdfast.store import part_chunks_for
from holdfast.telemetry.causes import DeclineCause, Reason
from holdfast.telemetry.events import EventLog
from holdfast.wire.state_messages import Agreement, Proposal
from trainer_side.background_thread import ThreadDied
from trainer_side.link.job_state import JobState
from trainer_side.link.last_transfers import LastTransfers
from trainer_side.link.link import Link
from trainer_side.link.ring_group import RingGroup
from trainer_side.link.share_transfer import WholeTransfer
from trainer_side.link.stager_message import StagerMessage
from trainer_side.transfer import SliceSource, Transfer, TransferState

_log = logging.getLogger("holdfast.trainer.link")

_EXIT_SECONDS_MAX = 10.0


class GroupState(JobState):
    """State of a job with several stagers; `problem` is set while one of them is lost."""

    def __init__(self, links: Sequence[Link], clock: Callable[[], float]) -> None:
        lead = links[0].job
        super().__init__(
            lead.rank,
            lead.ranks,
            store_url=lead.store_url,
            chunk_bytes=lead.chunk_bytes,
            attempt=lead.attempt,
            prior_failures=lead.prior_failures,
            clock=clock,
        )
        self._links = links
        for link in links:
            link.job.group = self

    @property
    def stagers(self) -> int:
        return len(self._links)

    @property
    def lead_problem(self) -> HoldfastError | None:
        return self._links[0].job.problem

    def is_last_loss(self, error: HoldfastError) -> bool:
        return super().is_last_loss(error) or any(link.job.is_last_loss(error) for link in self._links)


class StagerGroup:
    """A `ToStager` for several stagers. Methods belong to the training thread unless they say otherwise.

    `links`: One per stager, in the order of their shares.
    """

    def __init__(
        self,
        links: Sequence[Link],
        events: EventLog,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._links, self._events, self._clock = list(links), events, clock
        self._lead, *self._members = links
        self.job = GroupState(links, clock)
        self._rings = RingGroup([link.fetch for link in links])
        self._lock = threading.Lock()  # for `job`, which the threads of all links change
        self._newest_step = -1
        self._offered: list[WholeTransfer] = []
        self._shares: tuple[Layout, Shares] | None = None
        self._closed = self._leaving = False
        self._cancel_at_exit: Callable[[], None] = lambda: None
        for index, link in enumerate(links):
            link.on_lost, link.on_recovered = partial(self._on_link_lost, index), self._on_link_recovered
            if (problem := link.job.problem) is not None:  # before that
                self._on_link_lost(index, problem)

    # -- as a `ToStager` -------------------------------------------------------------------------------------------

    def agree(self, proposal: Proposal, *, seconds_max: float | None = None) -> Agreement:
        return self._lead.agree(proposal, seconds_max=seconds_max)

    def offer(self, step: int, source: SliceSource, record: SaveRecord, layout: Layout) -> Transfer:
        problem = self.job.problem
        reason = None if problem is None else Reason.from_error(problem)
        if problem is None and step <= self._newest_step:
            # Every rank applies this rule, so all ranks skip the step.
            reason = DeclineCause.NOT_NEW.because(
                f"step {step} is not above step {self._newest_step}, which was saved or declined before"
            )
        elif reason is not None:
            self.decline(step, reason)
        if reason is not None:
            return Transfer.not_sent(step, record, reason)
        self._newest_step = step
        shares = self._shares_of(layout)
        transfer = Transfer(step, record)
        whole = WholeTransfer(transfer, shares.count, self._on_transfer_changed, source)
        for share, link in zip(whole.shares, self._links, strict=False):
            link.offer_transfer(share, source, layout, shares.chunks_of(share.index))
        whole.on_share_changed()
        self._offered = [other for other in self._offered if not other.transfer.ended.is_set()] + [whole]
        return transfer

    def decline_reason(self, step: int) -> Reason | None:
        answers = (link.decline_reason(step) for link in self._links)
        return next((answer for answer in answers if answer is not None), None)

    def decline(self, step: int, reason: Reason, *, needed_pickle_bytes: int = 0) -> None:
        self._newest_step = max(self._newest_step, step)
        for link in self._links:
            link.decline(step, reason, needed_pickle_bytes=needed_pickle_bytes)

    def send_message(self, message: StagerMessage) -> None:
        self._lead.send_message(message)

    def fetch(
        self, fetch_kind: FetchKind, *, attempt: int = 0, step: int = 0, chunk: int = 0, body: bytes = b""
    ) -> bytes | None:
        return self._rings.fetch(fetch_kind, attempt=attempt, step=step, chunk=chunk, body=body)

    def close(self, *, wait_for: TransferState = TransferState.DURABLE, seconds_max: float) -> None:
        """Wait until all offered steps are durable (or staged), say good-bye to all stagers. Safe to call twice."""
        if not self._closed:
            self._closed = True
            transfers = [whole.transfer for whole in self._offered]
            LastTransfers(self.job, transfers, self._clock).wait(wait_for, seconds_max)
            # A failed step is declined at the other stagers before this rank leaves.
            for whole in self._offered:
                whole.fail_held()
            self._leaving = True
        for link in self._links:  # all first, so that no link waits for the good-bye of another
            link.begin_close()
        for link in self._links:
            link.close(wait_for=TransferState.STAGED, seconds_max=0.0)
        self._cancel_at_exit()

    def close_at_exit(self) -> None:
        """Close the links at exit: a script without `close` must not leave the stagers waiting for this rank."""
        close = partial(self.close, wait_for=TransferState.STAGED, seconds_max=_EXIT_SECONDS_MAX)
        self._cancel_at_exit = at_exit(close)

    def _shares_of(self, layout: Layout) -> Shares:
        if self._shares is None or self._shares[0] is not layout:
            part_chunks = part_chunks_for(self.job.store_url, layout.image_bytes, layout.chunk_bytes)
            self._shares = layout, Shares.of(layout, len(self._links), part_chunks)
        return self._shares[1]

    # -- in the links' threads -------------------------------------------------------------------------------------

    def _on_transfer_changed(self, whole: WholeTransfer, reached: TransferState | None) -> None:
        transfer, step = whole.transfer, whole.transfer.step
        with self._lock:
            if whole.is_durable:
                self.job.durable_step = max(self.job.durable_step, step)
            elif transfer.state is TransferState.STAGED and transfer.released.is_set():
                # Not before the memory is free: the next save may follow as soon as a step is staged.
                self.job.staged_step = max(self.job.staged_step, step)
        if reached is TransferState.STAGED and self.job.rank == 0 and len(whole.shares) > 1:
            self._lead.send_message(StagerMessage.all_staged(step))  # which names a step after a notice
        if reached in (TransferState.STAGED, TransferState.DURABLE):
            self._events.emit(reached.value, transfer.record.to_json(), step=step)
        elif reached in (TransferState.DECLINED, TransferState.FAILED):
            self._give_up(whole)

    def _give_up(self, whole: WholeTransfer) -> None:
        transfer, cause = whole.transfer, whole.ended_share
        reason = transfer.reason or DeclineCause.UNKNOWN.because("a stager gave no reason")
        facts = {**transfer.record.to_json(), "reason": reason.text, "cause": reason.cause}
        self._events.emit(transfer.state.value, facts, step=transfer.step)
        if cause is None or self._leaving:
            return
        name = self._links[cause.index].name
        if cause.in_doubt or (cause.was_sent and self._links[cause.index].job.problem is not None):
            _log.warning(
                "rank %d: step %d was sent to %s, which is lost: the other stagers find out whether it becomes durable",
                self.job.rank,
                transfer.step,
                name,
            )
            return
        for share in whole.shares:
            if not share.state.is_final:
                forwarded = Reason(reason.cause, f"{reason.text} ({name})")
                self._links[share.index].decline(transfer.step, forwarded)

    def _on_link_lost(self, index: int, error: HoldfastError) -> None:
        with self._lock:
            if self.job.problem is None:
                self.job.mark_lost(self._loss_of(index, error))
            elif isinstance(error, ThreadDied):
                self.job.problem = error
        if index == 0 and not self._lead.is_awaited:
            for member in self._members:
                member.drop_stager(
                    PeerLost(f"{self._lead.name} is lost, and with it the attempt of the others")
                )

    def _loss_of(self, index: int, error: HoldfastError) -> HoldfastError:
        """Return the error of one link as the group's; it names a stager other than the lead."""
        # `agree` raises the lead's own error, too, and `is_last_loss` compares by identity.
        is_own = index == 0 or isinstance(error, ThreadDied)
        return error if is_own else type(error)(f"{self._links[index].name}: {error}")

    def _on_link_recovered(self) -> None:
        attempt = self._lead.job.attempt
        for member in self._members:
            if member.job.problem is None and member.job.attempt != attempt:
                reason = (
                    f"attempt {member.job.attempt} is over: {self._lead.name} has begun attempt {attempt}"
                )
                member.drop_stager(PeerLost(reason))
        with self._lock:
            jobs = [link.job for link in self._links]
            if self.job.problem is None or isinstance(self.job.problem, ThreadDied):
                return
            for index, job in enumerate(jobs):
                if (problem := job.problem) is not None:
                    self.job.replace_problem(self._loss_of(index, problem))
                    return
            if any(job.attempt != attempt for job in jobs):
                return
            if attempt != self.job.attempt:
                self.job.rejoin(attempt)
            else:
                # Newer staged steps may be gone with the lost stager.
                self.job.staged_step = self.job.durable_step
            self.job.mark_recovered()
