"""Makes the watch from the settings: chooses the sources and the rank that polls them, and detects the cloud.

watch = ["aws", "sigterm"]   these two       watch = ["auto"]   the first cloud whose metadata server answers at start

watch ─► received ─► send: to the stager, or without one to rank 0 ══► agreed steps ─► agreed, the same on all ranks
└────────► pending: the notice that ends this job
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue

from holdfast.config import TrainerConfig
from holdfast.notices.notice import Notice, NoticeKind
from holdfast.supervised import report
from trainer_side.notice.agreed_steps import AgreedSteps
from trainer_side.notice.lost_siblings import LostSiblings, find_sibling_ranks
from trainer_side.notice.signals import SignalSource
from trainer_side.notice.watch import NoticeSource, NoticeWatch, SourceError, is_first_on_machine

_log = logging.getLogger("holdfast.trainer.watch")

_SIGNALS = {"sigterm": signal.SIGTERM, "sigusr1": signal.SIGUSR1}
_ANSWER_SECONDS_MAX = 2.0
_DETECT_SECONDS_MAX = 1.0


class PreemptionNotices:
    """The notices of this rank, and the one that all ranks have agreed on. Made and used by the main thread.

    `send`: Called in the watch's thread.
    """

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


def open_watch(
    config: TrainerConfig,
    on_notice: Callable[[Notice], None],
    *,
    rank: int,
    environ: Mapping[str, str] | None = None,
) -> NoticeWatch | None:
    """Start to watch the sources that `config.watch` names; return None if it names nothing. Main thread."""
    if not config.watch:
        return None
    environ = os.environ if environ is None else environ
    wakes: SimpleQueue[None] = SimpleQueue()
    siblings = _find_siblings(environ, rank=rank) if "sigterm" in config.watch else None
    signals = []
    for name in config.watch:
        if name in _SIGNALS:
            try:
                signals.append(
                    SignalSource(
                        _SIGNALS[name],
                        grace_seconds=config.watch_grace_seconds,
                        wake=lambda: wakes.put(None),
                        is_void=siblings.any_ended if siblings and name == "sigterm" else lambda: False,
                    )
                )
            except ValueError:
                _log.error(
                    "rank %d: the signal %s is not watched: only the main thread can handle signals, and the "
                    "Checkpointer was made in another thread; make it in the main thread",
                    rank,
                    name,
                )
    clouds = [name for name in config.watch if name not in _SIGNALS] if is_first_on_machine(environ) else []
    watch = NoticeWatch(
        lambda: find_servers(clouds, environ, rank=rank),
        on_notice,
        rank=rank,
        seconds=config.watch_seconds,
        signals=signals,
        wakes=wakes,
        siblings=siblings,
    )
    watch.start()
    if siblings is not None:
        siblings.start(lambda: any(source.ends_by_default for source in signals if source.name == "sigterm"))
    return watch


def _find_siblings(environ: Mapping[str, str], *, rank: int) -> LostSiblings | None:
    local_world_size = environ.get("LOCAL_WORLD_SIZE", "")
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or "TORCHELASTIC_RUN_ID" not in environ or not local_world_size.isdecimal():
        return None
    others = find_sibling_ranks(os.getpid(), int(local_world_size))
    return LostSiblings(others, rank=rank) if others else None


def find_servers(names: Sequence[str], environ: Mapping[str, str], *, rank: int = 0) -> list[NoticeSource]:
    """Return the metadata servers of these names; for `auto` the first that answers now, if any.

    SourceError: the variable that moves a server is no URL.
    """
    # Here and not above: they import http.client and ssl, which a rank without a server to poll does not need.
    from trainer_side.notice.aws import Aws
    from trainer_side.notice.azure import Azure
    from trainer_side.notice.gcp import Gcp

    clouds: dict[str, type[Aws] | type[Gcp] | type[Azure]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}
    found: list[NoticeSource] = [
        clouds[name](environ, seconds_max=_ANSWER_SECONDS_MAX) for name in names if name in clouds
    ]
    if "auto" in names and not found:
        for name, cloud in clouds.items():
            try:
                if cloud(environ, seconds_max=_DETECT_SECONDS_MAX).is_present():
                    _log.info(
                        "rank %d watches %s for preemption notices, because its metadata server answers",
                        rank,
                        name,
                    )
                    return [cloud(environ, seconds_max=_ANSWER_SECONDS_MAX)]
            except SourceError:
                continue
        _log.warning(
            "rank %d: no cloud's metadata server answers, so no preemption notice will be received. On AWS in a "
            "container the hop limit of the metadata service must be 2",
            rank,
        )
    return found
