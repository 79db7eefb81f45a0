"""Messages to the stager that need no answer. Each is encoded when it is sent, for the attempt of that moment."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.proof_record import Digest
from holdfast.notices.notice import Notice
from holdfast.wire import frames as wire
from holdfast.wire.doubt import EARLIER_ATTEMPTS_MAX, Doubt
from holdfast.wire.frames import Kind
from holdfast.wire.pace import PaceRequest
from holdfast.wire.step_proof import ResumeProof, proof_frame


class StagerMessage(NamedTuple):
    """One message for `ToStager.send_message`."""

    encode: Callable[[Sequence[int]], bytes]  # the frame, from all attempts of the job, the current one last
    keep_until_unix: float = 0.0  # until when to keep it while the stager is lost; 0: drop it

    @classmethod
    def fits(cls, step: int) -> StagerMessage:
        """Say that this rank's state fits the layout at `step`, which this rank does not offer now."""
        return cls(lambda attempts: wire.encode(Kind.FITS, attempt=attempts[-1], step=step))

    @classmethod
    def all_staged(cls, step: int) -> StagerMessage:
        """Say that each of several stagers has staged its share of `step`; rank 0 only."""
        return cls(lambda attempts: wire.encode(Kind.ALL_STAGED, attempt=attempts[-1], step=step))

    @classmethod
    def doubt(cls, doubt: Doubt) -> StagerMessage:
        """Say that steps of this rank may be torn; the stager tells all ranks and the flusher."""

        def encode(attempts: Sequence[int]) -> bytes:
            earlier = tuple(attempts[:-1][-EARLIER_ATTEMPTS_MAX:])
            return doubt._replace(earlier_attempts=earlier).to_frame(Kind.DOUBT, attempt=attempts[-1])

        return cls(encode, keep_until_unix=math.inf)

    @classmethod
    def proof(cls, key: CheckpointId, digest: Digest) -> StagerMessage:
        """Send the digest of this rank's first step after checkpoint `key`."""
        return cls(lambda attempts: proof_frame(key, digest, attempt=attempts[-1]))

    @classmethod
    def verdict(cls, key: CheckpointId, proof: ResumeProof) -> StagerMessage:
        """Send the result of the comparison after a resume from `key`; rank 0 only."""
        return cls(lambda attempts: proof_frame(key, proof, attempt=attempts[-1]))

    @classmethod
    def notice(cls, notice: Notice) -> StagerMessage:
        """Say that this rank's machine will be preempted."""

        def encode(attempts: Sequence[int]) -> bytes:
            return wire.encode(Kind.NOTICE, attempt=attempts[-1], body=wire.to_json(notice.to_json()))

        return cls(encode, keep_until_unix=math.inf if notice.deadline_unix is None else notice.deadline_unix)

    @classmethod
    def pace_request(cls, request: PaceRequest) -> StagerMessage:
        """Ask for another interval; rank 0 only."""
        body = wire.to_json(request.to_json())
        return cls(lambda attempts: wire.encode(Kind.WISH, attempt=attempts[-1], body=body))
