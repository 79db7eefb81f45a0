"""The copy thread: takes what `save()` left behind the gate, and the fingerprints, then lets training go on.

    save() ── gate closes ── Job ──► data.pkl ─► sample replicas ─► copy layer, layer, … ─► gate opens ─► last frame
                                                                                                          to the sender
    optimizer.step() waits for each layer … ────────────►│──────►│────────────►│
                     … longer than `seconds_max`: the job is abandoned, the step declined, and the gate opens

Layers come in the order in which the next update will come to them, so that it seldom waits for the first one. An
abandoned copy is never used: `cancelled` is looked at after the last byte was copied, before the sender gets it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.telemetry.causes import DeclineCause, Reason
from holdfast.telemetry.events import EventLog
from trainer_side.ledger import Ledger
from trainer_side.link.to_stager import ToStager
from trainer_side.save.copy_plan import Router
from trainer_side.save.fingerprint import Fingerprints
from trainer_side.save.gate import Gate
from trainer_side.save.staging import Staging
from trainer_side.state.skeleton import Capture, Outgrown
from trainer_side.tiers.keeping import Keeping
from trainer_side.transfer import Transfer

_log = logging.getLogger("holdfast.trainer")


@dataclass(frozen=True)
class CopyJob:
    """One copy.

    Attributes:
        transfer: Whose bytes they are.
        staging: Where they go.
        router: Knows the way through what is behind the gate.
        taken: What it copies.
        after: Recorded on the compute stream at `save()`, if tensors are on a device.
        fingerprints: Of the replicas; None where they are not asked for.
        keeping: In local tiers; None without any.
        abandoned: Set when an update did not wait for it any longer.
    """

    transfer: Transfer
    staging: Staging
    router: Router
    taken: Capture
    after: torch.cuda.Event | None
    fingerprints: Fingerprints | None
    keeping: Keeping | None = None
    abandoned: threading.Event = field(default_factory=threading.Event)

    def cancelled(self) -> bool:
        """Whether the rest of the copy is of no use: to the stager, nor to any local tier."""
        if self.keeping is not None and self.keeping.is_wanted:
            return self.abandoned.is_set()
        return self.abandoned.is_set() or self.transfer.settled.is_set()

    def give_up(self, reason: Reason) -> None:
        """What was copied must not be used."""
        self.abandoned.set()
        if self.keeping is not None:
            self.keeping.cancel(reason)


class Copier:
    """The thread, and the gate that it opens. Its methods belong to the training thread unless they say otherwise.

    Args:
        optimizers: Held back while a copy is under way.
        link: Learns of a copy that failed.
        ledger: Counts the stall.
        events: Event log.
        seconds_max: How long a copy is waited for.

    Attributes:
        gate: The gate.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        link: ToStager,
        *,
        ledger: Ledger,
        events: EventLog,
        seconds_max: float,
    ) -> None:
        self._link, self._ledger, self._events, self._seconds_max = link, ledger, events, seconds_max
        self.gate = Gate(optimizers, seconds_max=seconds_max, on_late=self._abandon)
        self._job: CopyJob | None = None  # under way; it holds a staging area and tensors, so not for longer
        self._idle = threading.Event()  # no staging area and no tensor is touched
        self._idle.set()
        self._jobs: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="holdfast-copy", daemon=True)
        self._thread.start()

    def wait(self) -> Reason | None:
        """Wait until no copy is under way: only for one tensor, when a step has ended before its copy had.

        Returns:
            None, or why it is in vain.
        """
        job = self._job
        stuck = job is not None and job.abandoned.is_set()
        if self._idle.wait(0.0 if stuck else self._seconds_max):
            return None
        what = f"the copy of step {job.transfer.step}" if job is not None else "a copy"
        return DeclineCause.COPY_STUCK.because(f"{what} does not end")

    def shut(self) -> None:
        """Close the gate: a copy follows, or `reopen`."""
        self._idle.clear()
        self.gate.close()

    def reopen(self) -> None:
        """There is nothing to copy after all."""
        self.gate.open()
        self._idle.set()

    def copy(self, job: CopyJob) -> None:
        """Begin a copy. The gate is shut."""
        self._job = job
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread, after its last copy, and take the gate away."""
        self._jobs.put(None)
        self._thread.join(self._seconds_max)
        if self._thread.is_alive():
            self._abandon()
        self.gate.remove()

    def _abandon(self) -> None:
        """The copy under way is not waited for any longer, and not used. Also in the thread of an optimizer."""
        job = self._job
        if job is None or job.abandoned.is_set():
            return
        reason = DeclineCause.COPY_STUCK.because(f"it did not end within {self._seconds_max:g} s")
        job.give_up(reason)
        step = job.transfer.step
        _log.error(
            "rank %d waited %g s for its own copy thread to end the copy of step %d; the step is given up, training "
            "goes on. Is the memory being swapped, or the device stuck?",
            self._link.rank,
            self._seconds_max,
            step,
        )
        self._link.decline(step, reason)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._copy(job)
            except Outgrown as outgrown:
                self._fail(job, DeclineCause.OUTGROWN.because(outgrown))
            except Exception as error:  # noqa: BLE001 - the thread must not die: every later save() would wait for it
                self._fail(job, DeclineCause.COPY_FAILED.because(error))
                _log.debug("the copy failed", exc_info=True)
            finally:
                self.gate.open()  # whatever happened here, the training goes on
                self._job = None
                del job  # and while this thread waits, another area may take the place of its
                self._idle.set()

    def _fail(self, job: CopyJob, reason: Reason) -> None:
        job.give_up(reason)
        _log.error("rank %d gives up step %d: %s", self._link.rank, job.transfer.step, reason)
        self._link.decline(job.transfer.step, reason)

    def _copy(self, job: CopyJob) -> None:
        begun, record = time.monotonic(), job.transfer.record

        def copied() -> None:
            # Before the sender gets the last frame: what it then says of this checkpoint is complete.
            waited_seconds = self.gate.open()
            record["copy_seconds"] = time.monotonic() - begun
            record["gate_seconds"] = waited_seconds
            record["cst_seconds"] = record["save_seconds"] + waited_seconds

        if job.after is not None:
            torch.cuda.set_device(job.after.device)  # of this thread: it begins on the first one
        if job.taken.deferred is not None:
            job.staging.fill(job.taken.deferred.contents())
        if job.fingerprints is not None and not job.cancelled():
            _fingerprint(
                job, job.fingerprints, record
            )  # of all replicas, so before any of them is given free
        route = job.router.route(
            job.taken.sources, self.gate.update_order, order_changed=self.gate.order_changed
        )
        self.gate.hold(route.storages)
        job.staging.copy_gated(
            job.taken.sources,
            route,
            after=job.after,
            cancelled=job.cancelled,
            passed=self.gate.passed,
            copied=copied,
        )
        self._ledger.stalled(record["cst_seconds"])
        self._events.emit("save", dict(record), step=job.transfer.step)


def _fingerprint(job: CopyJob, fingerprints: Fingerprints, record: dict[str, Any]) -> None:
    begun = time.monotonic()
    fingerprints.take_gated(job.taken.sources, job.after)
    job.transfer.fingerprints = fingerprints.text()
    record["fingerprint_seconds"] = time.monotonic() - begun
