"""The preemption notices that this rank has received, and the one that all ranks have agreed on.

watch ─► received ─► send: to the stager, or without one to rank 0 ══► agreed steps ─► agreed, the same on all ranks
└────────► pending: the notice that ends this job
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.config import TrainerConfig
from holdfast.notices.notice import Notice, NoticeKind
from holdfast.supervised import report
from trainer_side.notice.agreed_steps import AgreedSteps
from trainer_side.notice.open_sources import open_watch


class PreemptionNotices:
    """The notices of this rank. Made and used by the main thread. `send`: Called in the watch's thread."""

    def __init__(
        self,
        config: TrainerConfig,
        agreed_steps: AgreedSteps,
        send: Callable[[Notice], None],
        *,
        rank: int,
    ) -> None:
        self._agreed_steps, self._send = agreed_steps, send
        self._received: Notice | None = None
        self._watch = open_watch(config, self._receive, rank=rank)

    def _receive(self, notice: Notice) -> None:
        """Note and send a notice. Watch's thread."""
        if notice.kind is NoticeKind.TERMINATE:
            self._received = notice
            report("noticed")
        self._send(notice)

    @property
    def pending(self) -> Notice | None:
        """The notice that ends this job, for this rank's machine or another one; None without one."""
        signalled = None if self._watch is None else self._watch.signal_notice()
        agreed = self._agreed_steps.notice
        if agreed is not None and agreed.kind is not NoticeKind.TERMINATE:
            agreed = None
        return self._received or signalled or agreed

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
