"""Pending requests of this rank to the stager: compare the tensors of all ranks; read bytes that the ring still has.

    asking thread   agree ─► PROPOSE      fetch ─► FETCH       each waits for its answer, until a deadline
    link's thread   RESERVED, REFUSED ─► resolve_proposal    FETCHED ─► resolve_fetch    the stager is lost ─► fail_all

One proposal is open at a time; the stager answers fetches in the order in which they were sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from holdfast.config import TrainerConfig
from holdfast.errors import HoldfastError, PeerLost, ProtocolError
from holdfast.ring.remains import FetchKind
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind
from holdfast.wire.state_messages import Agreement, Proposal
from holdfast.wire.welcome import Welcome
from trainer_side.ranks.ports import StagerPort

_FETCH_SECONDS_MAX = 30.0  # other ranks wait for the answer, too
_SLACK_SECONDS = 10.0  # beyond the stager's own deadline for an answer


class OpenRequests:
    """Requests to one stager. `agree` and `fetch` belong to any thread, the rest to the link's.

    `enqueue`: Runs a function in the link's thread.
    """

    def __init__(
        self,
        config: TrainerConfig,
        port: StagerPort,
        welcome: Welcome,
        *,
        rank: int,
        enqueue: Callable[[Callable[[], None]], None],
    ) -> None:
        self._port, self._attempt, self._rank, self._enqueue = port, welcome.attempt, rank, enqueue
        self._agree_seconds_max = max(config.start_seconds_max, welcome.offer_seconds_max + _SLACK_SECONDS)
        self._fetch_seconds_max = min(config.stager_seconds_max, _FETCH_SECONDS_MAX)
        self._proposed: Future[Agreement] | None = None
        self._fetches: deque[Future[Frame]] = deque()  # not answered yet, in the order of the questions
        self._problem: HoldfastError | None = None

    @property
    def is_fetching(self) -> bool:
        return bool(self._fetches)

    def agree(self, proposal: Proposal, seconds_max: float | None = None) -> Agreement:
        """As `ToStager.agree`."""
        limit = self._agree_seconds_max if seconds_max is None else min(self._agree_seconds_max, seconds_max)
        if self._problem is not None:
            raise self._problem
        answer: Future[Agreement] = Future()
        message = proposal.to_frame(self._attempt)

        def send_request() -> None:
            self._proposed = answer
            if self._problem is not None:
                self.resolve_proposal(self._problem)
            else:
                self._port.send(message)

        self._enqueue(send_request)
        try:
            return answer.result(limit)
        except TimeoutError:
            raise PeerLost(
                f"rank {self._rank} waited {limit:g} s for the stager to compare the layouts of all ranks"
            ) from None

    def fetch(
        self, fetch_kind: FetchKind, *, attempt: int = 0, step: int = 0, chunk: int = 0, body: bytes = b""
    ) -> bytes | None:
        """As `ToStager.fetch`. Several threads may ask at once."""
        answer: Future[Frame] = Future()
        message = wire.encode(
            Kind.FETCH,
            attempt=self._attempt,
            step=step,
            chunk=chunk,
            flags=fetch_kind,
            arg=attempt,
            body=body,
        )

        def send_request() -> None:
            if self._problem is not None:
                answer.set_exception(self._problem)
            else:
                self._fetches.append(answer)
                self._port.send(message)

        self._enqueue(send_request)
        why: object = f"no answer within {self._fetch_seconds_max:g} s"
        try:
            frame = answer.result(self._fetch_seconds_max)
        except (TimeoutError, HoldfastError) as error:
            why = error if isinstance(error, HoldfastError) else why
            problem = f"rank {self._rank} asked the stager for the contents of its ring: {why}"
            raise PeerLost(problem) from None
        if (frame.flags, frame.step, frame.chunk) != (fetch_kind, step, chunk):
            raise ProtocolError(
                f"rank {self._rank} asked for {fetch_kind.name} of step {step}, chunk {chunk}; the stager answered "
                f"{frame.flags} of step {frame.step}, chunk {frame.chunk}"
            )
        return frame.body if frame.arg else None

    # -- the link's thread ---------------------------------------------------------------------------------------

    def resolve_proposal(self, answer: Agreement | HoldfastError) -> bool:
        """Hand over the answer to this rank's proposal. False if no proposal is open."""
        proposed, self._proposed = self._proposed, None
        if proposed is None:
            return False
        if isinstance(answer, HoldfastError):
            proposed.set_exception(answer)
        else:
            proposed.set_result(answer)
        return True

    def resolve_fetch(self, frame: Frame) -> None:
        """Hand over the answer to the oldest fetch. ProtocolError: this rank had asked for nothing."""
        if not self._fetches:
            raise ProtocolError(
                f"rank {self._rank}: the stager sent FETCHED, but this rank had asked for nothing; "
                "install the same holdfast on all machines"
            )
        self._fetches.popleft().set_result(frame)

    def fail_all(self, problem: HoldfastError) -> None:
        """Raise `problem` in all waiting threads, and in later requests."""
        self._problem = problem
        self.resolve_proposal(problem)
        while self._fetches:
            self._fetches.popleft().set_exception(problem)
