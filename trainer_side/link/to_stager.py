"""The interface of a training rank to the stager: `Link`, `StagerGroup`, or `NoStager` in a job without one."""

from __future__ import annotations

from typing import Protocol

from holdfast.image.layout import Layout
from holdfast.image.save_record import SaveRecord
from holdfast.ring.remains import FetchKind
from holdfast.telemetry.causes import Reason
from holdfast.wire.state_messages import Agreement, Proposal
from trainer_side.link.job_state import JobState
from trainer_side.link.stager_message import StagerMessage
from trainer_side.transfer import SliceSource, Transfer, TransferState


class ToStager(Protocol):
    """Sends this rank's checkpoints and messages to the stager. Training thread, unless a member says otherwise."""

    @property
    def job(self) -> JobState:
        """This rank's number, and the state of its connection to the stager. Any thread."""
        ...

    def agree(self, proposal: Proposal, *, seconds_max: float | None = None) -> Agreement:
        """Compare this rank's tensors with those of the others, through the stager. Collective.

        Waits for the slowest rank, as long as the settings say, or `seconds_max` if that is less.

        Raises:
            StateError: The ranks hold different tensors: which rank, which tensor, expected, got.
            PeerLost: The stager is lost, or a rank did not answer in time.
        """
        ...

    def offer(self, step: int, source: SliceSource, record: SaveRecord, layout: Layout) -> Transfer:
        """Offer the checkpoint of `step`; returns at once.

        Args:
            step: Higher than every step before; otherwise it is declined at once.
            source: This rank's bytes, which must not change until the transfer is released.
            record: Facts about the step so far, `saved_at_unix` among them; the link adds its times.
            layout: The same one on every rank.
        """
        ...

    def decline_reason(self, step: int) -> Reason | None:
        """Return why `step`, which this rank has not offered yet, is declined; None if it is not, as far as known.

        Any thread.
        """
        ...

    def decline(self, step: int, reason: Reason, *, needed_pickle_bytes: int = 0) -> None:
        """Tell all ranks, through the stager, that this rank takes no checkpoint of `step`. Any thread.

        The step is new, or was offered and cannot be finished. On rank 0, `needed_pickle_bytes` above 0 means that the
        pickle has outgrown its reserve.
        """
        ...

    def send_message(self, message: StagerMessage) -> None:
        """Send a message that needs no answer. Any thread."""
        ...

    def fetch(
        self, fetch_kind: FetchKind, *, attempt: int = 0, step: int = 0, chunk: int = 0, body: bytes = b""
    ) -> bytes | None:
        """Ask the stager's ring for bytes of an earlier checkpoint. Any thread.

        Args:
            fetch_kind: The kind of bytes.
            attempt: Attempt that wrote the checkpoint.
            step: Its step.
            chunk: Which of its chunks.
            body: The rest of the question, as docs/wire.md says.

        Returns:
            The answer; None if the ring does not have these bytes.

        Raises:
            PeerLost: The stager is gone, or has not answered within `stager_seconds_max`, or 30 s if that is less.
            ProtocolError: The stager's answer does not fit the question.
        """
        ...

    def close(self, *, wait_for: TransferState = TransferState.DURABLE, seconds_max: float) -> None:
        """Wait until all offered steps are durable (or staged), and leave. Safe to call twice."""
        ...
