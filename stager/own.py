"""A stager that a rank of a job has started: it serves that job and its restarts, and ends by itself.

    rank 0 ─► listening, says so on stdout ─► serving ─┬─ all ranks have left ─► what is staged is written ─► ended
                                                 ▲     └─ ranks are lost ─► waits for the next start ─┬─► ended
                                                 └──────────────────────── it comes ──────────────────┘

A signal that ends the whole job (SIGTERM by Slurm) reaches this process as well, while the ranks save once more. After
the first signal the stager therefore serves its ranks until they leave, and waits for no restart.
"""

from __future__ import annotations

import logging
from types import FrameType

from holdfast.config import StagerConfig
from holdfast.net.address import Address
from holdfast.own_stager import OwnStagerEndpoint, OwnStagerNote, report_endpoint
from stager.flusher_process import Flusher
from stager.standing import StandingStager, key_of

_log = logging.getLogger("holdfast.stager")

_IDLE_SECONDS_MAX = 60.0  # torchrun restarts its ranks sooner


class OwnStager(StandingStager):
    """A `StandingStager` that ends with its job. Main thread. `host`: the name that ranks connect to. Raises as
    `StandingStager`, but no `StoreError`: that is reported to the ranks.
    """

    def __init__(self, config: StagerConfig, host: str) -> None:
        if config.idle_seconds_max is None:
            config = config.model_copy(update={"idle_seconds_max": _IDLE_SECONDS_MAX})
        self._serving = self._ends_after_job = False  # first: a signal may come at once
        super().__init__(config)
        address = Address(host, self.address.port)
        self._note = OwnStagerNote(config.store, config.runtime_dir, address, key_of(config), config.share)
        report_endpoint(OwnStagerEndpoint(str(address), "", str(config.share)))

    def _attach_early(self) -> Flusher | None:
        return None  # attach at the first job, so that its ranks are told why there is no flusher

    def run(self, *, jobs: int | None = None) -> None:
        """As `StandingStager.run`."""
        try:
            super().run(jobs=jobs)
        finally:
            self._note.close()

    def _serve_next(self) -> None:
        self._serving = True
        try:
            super()._serve_next()
        finally:
            self._serving = False

    def _ends_with_job(self) -> bool:
        # A restart may be waiting already, since the last job's checkpoints were being written.
        return (not self._lost or self._ends_after_job) and self._listener.next_job() is None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._serving and not self._ends_after_job:
            self._ends_after_job = True
            _log.warning(
                "told to stop by signal %d: this stager ends once the ranks of its job have left", number
            )
            return
        super()._on_signal(number, frame)
