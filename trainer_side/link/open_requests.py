"""OpenRequests of this rank to the stager: do all ranks have the same tensors, and what does the ring still have?

    asking thread   agree ─► PROPOSE      fetch ─► FETCH       each waits until it is answered, or for so long
    link's thread   RESERVED, REFUSED ─► agreed       FETCHED ─► fetched       the stager is lost ─► end

One proposal is open at a time; fetches are answered in the order in which they were asked.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.config import TrainerConfig
from holdfast.errors import HoldfastError, PeerLost, ProtocolError
from holdfast.ring.remains import Asked
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind
from holdfast.wire.state_messages import Agreement, Proposal
from holdfast.wire.welcome import Welcome
from trainer_side.ranks.ports import StagerPort

_FETCH_SECONDS_MAX = 30.0  # other ranks wait for the answer, too
_SLACK_SECONDS = 10.0  # for an answer that itself has a deadline at the stager


@dataclass(eq=False)
class _Proposed:
    """An open `agree`."""

    answered: threading.Event = field(default_factory=threading.Event)
    answer: Agreement | HoldfastError | None = None


@dataclass(eq=False)
class _Fetch:
    """An open `fetch`. `answer` stays None if the stager has gone."""

    answered: threading.Event = field(default_factory=threading.Event)
    answer: Frame | None = None


class OpenRequests:
    """See the module. `agree` and `fetch` belong to any thread, the rest to the link's.

    Args:
        config: Deadlines of answers.
        port: To the stager.
        welcome: The stager's message at start-up.
        command: Runs a function in the link's thread.
    """

    def __init__(
        self,
        config: TrainerConfig,
        port: StagerPort,
        welcome: Welcome,
        *,
        rank: int,
        command: Callable[[Callable[[], None]], None],
    ) -> None:
        self._port, self._attempt, self._rank, self._command = port, welcome.attempt, rank, command
        self._agree_seconds_max = max(config.start_seconds_max, welcome.offer_seconds_max + _SLACK_SECONDS)
        self._fetch_seconds_max = min(config.stager_seconds_max, _FETCH_SECONDS_MAX)
        self._proposed: _Proposed | None = None
        self._fetches: deque[_Fetch] = deque()  # asked and not answered, in this order
        self._problem: HoldfastError | None = None

    @property
    def fetching(self) -> bool:
        return bool(self._fetches)

    def agree(self, proposal: Proposal, seconds_max: float | None = None) -> Agreement:
        """Compare this rank's tensors with those of the others. Collective; waits for the slowest rank.

        Raises:
            StateError: The ranks hold different tensors: which rank, which tensor, expected, got.
            PeerLost: A rank or the stager did not answer in time.
        """
        limit = self._agree_seconds_max if seconds_max is None else min(self._agree_seconds_max, seconds_max)
        if self._problem is not None:
            raise self._problem
        proposed = _Proposed()
        message = proposal.to_frame(self._attempt)

        def ask() -> None:
            self._proposed = proposed
            if self._problem is not None:
                self.agreed(self._problem)
            else:
                self._port.send(message)

        self._command(ask)
        if not proposed.answered.wait(limit):
            raise PeerLost(
                f"rank {self._rank} waited {limit:g} s for the stager to compare the layouts of all ranks"
            )
        if not isinstance(proposed.answer, Agreement):
            assert proposed.answer is not None
            raise proposed.answer
        return proposed.answer

    def fetch(
        self, asked: Asked, *, attempt: int = 0, step: int = 0, chunk: int = 0, body: bytes = b""
    ) -> bytes | None:
        """Ask the ring for bytes of earlier checkpoints. Several threads may ask at once.

        Args:
            asked: The kind of bytes.
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
        fetch = _Fetch()
        message = wire.encode(
            Kind.FETCH,
            attempt=self._attempt,
            step=step,
            chunk=chunk,
            flags=asked,
            arg=attempt,
            body=body,
        )

        def ask() -> None:
            if self._problem is not None:
                fetch.answered.set()
            else:
                self._fetches.append(fetch)
                self._port.send(message)

        self._command(ask)
        in_time = fetch.answered.wait(self._fetch_seconds_max)
        if fetch.answer is None:
            why = self._problem if in_time else f"no answer within {self._fetch_seconds_max:g} s"
            raise PeerLost(f"rank {self._rank} asked the stager for the contents of its ring: {why}")
        frame = fetch.answer
        if (frame.flags, frame.step, frame.chunk) != (asked, step, chunk):
            raise ProtocolError(
                f"rank {self._rank} asked for {asked.name} of step {step}, chunk {chunk}; the stager answered "
                f"{frame.flags} of step {frame.step}, chunk {frame.chunk}"
            )
        return frame.body if frame.arg else None

    # -- the link's thread ---------------------------------------------------------------------------------------

    def agreed(self, answer: Agreement | HoldfastError) -> bool:
        """Take the answer to this rank's proposal. False if none is open."""
        proposed, self._proposed = self._proposed, None
        if proposed is None:
            return False
        proposed.answer = answer
        proposed.answered.set()
        return True

    def fetched(self, frame: Frame) -> None:
        """The stager has answered the oldest fetch.

        Raises:
            ProtocolError: This rank had asked for nothing.
        """
        if not self._fetches:
            raise ProtocolError(
                f"rank {self._rank}: the stager sent FETCHED, but this rank had asked for nothing; "
                "install the same holdfast on all machines"
            )
        fetch = self._fetches.popleft()
        fetch.answer = frame
        fetch.answered.set()

    def end(self, problem: HoldfastError) -> None:
        """Nothing is answered any more."""
        self._problem = problem
        self.agreed(problem)
        while self._fetches:
            self._fetches.popleft().answered.set()
