"""The copy thread: takes fingerprints, copies the tensors behind the gate, then opens the gate.

    save() ── gate closes ── Job ──► data.pkl ─► sample replicas ─► copy layer, layer, … ─► gate opens ─► last frame
                                                                                                          to the sender
    optimizer.step() waits for each layer … ────────────►│──────►│────────────►│
                     … longer than `seconds_max`: the job is abandoned, the step declined, and the gate opens

Layers are copied in the order in which the next update reaches them, so the update seldom waits for the first one. An
abandoned copy is never used: the thread checks `cancelled` after the last byte is copied, before the sender gets it. A
torn copy is not used either: before a layer is released, its tensors are compared with those at `save()` (tearing.py).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.telemetry.causes import DeclineCause, Reason
from holdfast.telemetry.events import EventLog
from trainer_side.background_thread import BackgroundThread, ThreadDied
from trainer_side.ledger import Ledger
from trainer_side.link.to_stager import ToStager
from trainer_side.save.copy_plan import Batch, Route, Router
from trainer_side.save.device_dedup import SkippedBytesChanged
from trainer_side.save.device_stream import bind_thread_to_device
from trainer_side.save.fingerprint import Fingerprints
from trainer_side.save.gate import Gate
from trainer_side.save.hook_coverage import CopyPolicy, HookCoverage
from trainer_side.save.staging import Staging
from trainer_side.save.tearing import SavedInstant
from trainer_side.state import accelerator
from trainer_side.state.accelerator import StreamEvent
from trainer_side.state.skeleton import Capture, Outgrown
from trainer_side.state.tree import with_inner_optimizers
from trainer_side.tiers.tier_write import TierWrite
from trainer_side.transfer import Transfer

_log = logging.getLogger("holdfast.trainer")


@dataclass(frozen=True)
class CopyJob:
    transfer: Transfer
    staging: Staging
    router: Router
    capture: Capture
    after: StreamEvent | None  # recorded on the training's stream at `save()`, if tensors are on a device
    fingerprints: Fingerprints | None  # None if they are not wanted
    tier_write: TierWrite | None = None  # None without local tiers
    instant: SavedInstant | None = None  # None if nothing is copied behind the gate
    # An update has stopped waiting, or the copy is torn.
    abandoned: threading.Event = field(default_factory=threading.Event)
    # An update has begun, so released tensors may change.
    updating: threading.Event = field(default_factory=threading.Event)
    all_copied: threading.Event = field(default_factory=threading.Event)  # every live tensor has been copied
    inside: bool = False  # `save()` waits for the whole copy
    compare_later: bool = False  # the next update or save first compares the copy with the live bytes
    device: torch.device | None = None
    route: Route | None = None  # `save()` has reserved device memory for it; None: the copy thread makes one

    def cancelled(self) -> bool:
        """Whether neither the stager nor any local tier can use the copy any more."""
        if self.tier_write is not None and self.tier_write.is_wanted:
            return self.abandoned.is_set()
        return self.abandoned.is_set() or self.transfer.settled.is_set()

    def give_up(self, reason: Reason) -> None:
        """Withdraw the step: the bytes copied so far must not be used."""
        self.abandoned.set()
        if self.tier_write is not None:
            self.tier_write.cancel(reason)


class Copier:
    """The copy thread and its gate. Methods belong to the training thread unless they say otherwise.

    An update, or the next save, waits at most `seconds_max` for a copy.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        link: ToStager,
        *,
        ledger: Ledger,
        events: EventLog,
        seconds_max: float,
        copy_policy: CopyPolicy,
    ) -> None:
        self._link, self._ledger, self._events, self._seconds_max = link, ledger, events, seconds_max
        gated = with_inner_optimizers(optimizers)
        self.gate = Gate(gated, seconds_max=seconds_max, on_late=self._abandon, on_hook=self._on_step_hook)
        self._hook_coverage, self._copy_policy = HookCoverage(gated), copy_policy
        self.update_streams: list[Any] = []  # streams of the device on which updates were queued recently
        self.updates = 0  # steps of optimizers that have begun
        self.on_update: Callable[[], None] = lambda: None  # called when one begins, on the training thread
        self._changing_depth = 0  # nesting depth of `with checkpointer.changing()` on the training thread
        self._job: CopyJob | None = None  # in flight; then None, since it holds a staging area and tensors
        self._stuck: CopyJob | None = None  # the job whose deadline has passed
        self._idle = threading.Event()  # set while the thread touches no area and no tensor
        self._idle.set()
        self._jobs: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._thread_device: torch.device | None = None  # the thread's current device
        self.problem: ThreadDied | None = None  # why copying has stopped for good
        self._thread = BackgroundThread(
            "holdfast-copy",
            self._run,
            rank=link.job.rank,
            task="copies the state",
            on_death=self._on_thread_death,
        )
        self._thread.start()

    def wait(self) -> Reason | None:
        """Wait until no copy is in flight; return the reason if the copy is stuck."""
        job = self._job
        if self._idle.wait(0.0 if job is not None and job is self._stuck else self._seconds_max):
            return None
        what = f"the copy of step {job.transfer.step}" if job is not None else "a copy"
        return DeclineCause.COPY_STUCK.because(f"{what} does not end")

    def close_gate(self, *, gate: bool = True) -> None:
        """Close the gate, unless no live tensor is left to copy. `copy` or `reopen_gate` follows."""
        self._idle.clear()
        if gate:
            self.gate.close()
        else:
            self.gate.leave_open()

    def reopen_gate(self) -> None:
        """Undo `close_gate`: there is nothing to copy."""
        self.gate.open()
        self._idle.set()

    def reopen_gate_if_idle(self) -> bool:
        """Undo `close_gate` after an exception, unless the copy has begun. Returns whether it was undone."""
        if self._job is not None:
            return False
        self.reopen_gate()
        return True

    def copy(self, job: CopyJob) -> None:
        """Begin a copy, after `close_gate`."""
        self._job = job
        self._jobs.put(job)
        if self.problem is not None:  # the thread has died meanwhile
            self._on_thread_death(self.problem)

    def choose_copy_mode(
        self, step: int, instant: SavedInstant | None, nbytes: int, *, on_device: bool
    ) -> tuple[bool, bool]:
        """Return whether `save()` waits for the copy, and whether live bytes are compared with it afterwards.

        `instant`: The live tensors to copy; None without any. `on_device`: Whether some of them are on a device.
        """
        trusted = self._hook_coverage.record_save(instant)
        if instant is None:
            return False, False
        if self._changing_depth or self._copy_policy.must_copy_inside(nbytes, on_device=on_device):
            return True, False
        if trusted and not self._copy_policy.is_sampled(step) and self._copy_policy.allow_behind_gate(step):
            return False, False
        return True, True

    def finish_inside_save(self, job: CopyJob) -> None:
        """Wait for the copy, unless everything that changes its tensors is proven to wait at the gate."""
        if not job.inside:
            return
        self.gate.wait()
        if not job.compare_later or job.instant is None:
            return
        # The speed of copies may have been measured just now, for the first time.
        on_device = bool(job.route and job.route.device)
        if not self._copy_policy.must_copy_inside(job.staging.nbytes, on_device=on_device):
            self._hook_coverage.watch(job.instant)
            self._copy_policy.schedule_comparison(job.instant, job.staging, job.all_copied.is_set)

    def compare_if_due(self) -> None:
        """Compare the live state with the last copy, if that is due. Called before an update or a save."""
        if not self._copy_policy.has_pending_comparison:
            return
        if accelerator.is_capturing() or not self._idle.wait(self._seconds_max):
            self._copy_policy.cancel_comparison()
        elif self._copy_policy.compare():
            return
        self._hook_coverage.stop_watching()  # that save proves nothing

    def wait_copied(self) -> None:
        """Wait until the thread reads no tensor: the script may change tensors by any means until the next save."""
        self.gate.wait()
        self._hook_coverage.stop_watching()
        self._copy_policy.cancel_comparison()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Let the script change tensors by any means inside the block; a save in it waits for its own copy."""
        self.wait_copied()
        self._changing_depth += 1
        try:
            yield
        finally:
            self._changing_depth -= 1

    def close(self, seconds_max: float | None = None) -> None:
        """End the thread after its last copy, waiting at most `seconds_max`, and remove the gate."""
        self._copy_policy.cancel_comparison()
        self._jobs.put(None)
        self._thread.join(self._seconds_max if seconds_max is None else min(seconds_max, self._seconds_max))
        if self._thread.is_alive():
            self._abandon()
        self.gate.remove()

    def _abandon(self) -> None:
        """Give up the copy in flight. Also called in an optimizer's thread."""
        job = self._job
        if job is None or job.abandoned.is_set():
            return
        reason = DeclineCause.COPY_STUCK.because(f"it did not end within {self._seconds_max:g} s")
        self._stuck, step = job, job.transfer.step
        job.give_up(reason)
        _log.error(
            "rank %d waited %g s for its own copy thread to end the copy of step %d; the step is given up, and "
            "training continues. Check whether memory is being swapped or the device hangs",
            self._link.job.rank,
            self._seconds_max,
            step,
        )
        self._link.decline(step, reason)

    def _on_step_hook(self, optimizer: torch.optim.Optimizer) -> None:
        self.updates += 1
        self.on_update()
        if accelerator.is_capturing():
            self._hook_coverage.record_graph_capture(optimizer)
        elif (kind := accelerator.kind()) is not None:
            stream = accelerator.module_of(kind).current_stream()
            if stream not in self.update_streams:
                self.update_streams = [*self.update_streams[-1:], stream]
        self.compare_if_due()
        self._hook_coverage.record_hook(optimizer)
        job = self._job
        if job is None or job.instant is None or job.updating.is_set():
            return
        job.updating.set()
        # torch counts a change right after making it, so every change of this thread is counted by now.
        if self.gate.closed and (path := job.instant.find_changed()):
            self.withdraw(job, path)

    def withdraw(self, job: CopyJob, path: str) -> None:
        """Withdraw a torn copy. Any thread."""
        if job.abandoned.is_set():
            return
        what = (
            f"{path} was changed after save({job.transfer.step}), before its copy was done, and not in a step of its "
            "optimizer"
        )
        way_out = "Call checkpointer.wait_copied() before such changes, or make them in `with checkpointer.changing():`"
        self._fail(job, DeclineCause.TORN.because(f"{what}; the step is withdrawn. {way_out}"))
        self._copy_policy.distrust(what)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _on_thread_death(self, error: ThreadDied) -> None:
        """Release everything that waits for a copy, when the thread has died."""
        self.problem = error
        job, self._job, self._stuck = self._job, None, None
        try:
            if job is not None:
                reason = DeclineCause.COPY_FAILED.because(error)
                job.give_up(reason)
                self._link.decline(job.transfer.step, reason)
        finally:
            self._idle.set()
            self.gate.open()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not self._try_copy(job):
                # Not in an `except` block: the error would keep device memory alive.
                with contextlib.suppress(RuntimeError):  # from a failed device
                    job.staging.discard()
            self.gate.open()  # if an exception skips this, `_on_thread_death` opens the gate
            self._job = self._stuck = None
            del job  # a waiting thread must not keep the area alive
            self._idle.set()

    def _try_copy(self, job: CopyJob) -> bool:
        """Run one copy; return whether it was completed."""
        try:
            self._copy(job)
        except Outgrown as outgrown:
            self._fail(job, DeclineCause.OUTGROWN.because(outgrown))
        except SkippedBytesChanged as outdated:
            what = (
                f"{outdated.path} was the same at the saves before, and has changed at save({job.transfer.step}) in a "
                "way that torch does not count; the step is withdrawn, and from now on each save copies the tensor"
            )
            self._fail(job, DeclineCause.TORN.because(what))
        except Exception as error:  # noqa: BLE001 - the thread must not die: every later save() would wait for it
            self._fail(job, DeclineCause.COPY_FAILED.because(error))
            _log.debug("the copy failed", exc_info=True)
        else:
            return True
        return False

    def _fail(self, job: CopyJob, reason: Reason) -> None:
        job.give_up(reason)
        _log.error("rank %d gives up step %d: %s", self._link.job.rank, job.transfer.step, reason)
        self._link.decline(job.transfer.step, reason)

    def _copy(self, job: CopyJob) -> None:
        begun, record = time.monotonic(), job.transfer.record

        def copied() -> None:
            # Called before the sender gets the last frame, so the record that it sends is complete.
            record.copy_seconds = time.monotonic() - begun
            if job.instant is not None and not watch.unread:
                self._copy_policy.record_copy(job.staging.nbytes, record.copy_seconds)
            record.gate_seconds = self.gate.open()
            record.cst_seconds = (record.save_seconds or 0.0) + record.gate_seconds

        if job.device is not None and job.device != self._thread_device:
            bind_thread_to_device(job.device)
            self._thread_device = job.device
        if job.capture.deferred is not None:
            job.staging.fill(job.capture.deferred.contents())
        if job.fingerprints is not None and not job.cancelled():
            # Fingerprints need every replica, so they are taken before the first one is released.
            fingerprint_begun = time.monotonic()
            job.fingerprints.sample_gated(job.capture.sources)
            job.transfer.fingerprints = job.fingerprints.text()
            record.replicas_digest = job.fingerprints.digest()
            record.fingerprint_seconds = time.monotonic() - fingerprint_begun
            self.check_all(job)  # a changed replica would pass for drift between the ranks
            if job.tier_write is not None and not self._link.job.is_alive and not job.abandoned.is_set():
                job.tier_write.compare(job.transfer.fingerprints)  # without a stager, the ranks compare
        route = job.route or job.router.route(
            job.capture.sources, self.gate.update_order, order_changed=self.gate.order_changed
        )
        live = job.staging.live_route(route)
        self.gate.hold(live.storages)
        watch = _BatchChecker(self, job, len(live.host) + len(live.device))
        job.staging.copy_gated(
            job.capture.sources,
            route,
            after=job.after,
            cancelled=job.cancelled,
            release=self.gate.release,
            on_all_read=copied,
            on_read=watch.on_read,
            on_copied=watch.on_copied,
        )
        assert record.cst_seconds is not None, "copy_gated has called `on_all_read`"
        self._ledger.add_stall(record.cst_seconds)
        self._events.emit("save", record.to_json(), step=job.transfer.step)

    def check_all(self, job: CopyJob) -> None:
        """Withdraw the copy if a tensor has changed since `save()` though no update has begun."""
        if job.instant is None or job.updating.is_set():
            return
        path = job.instant.find_changed()
        # An update that began meanwhile has made this check itself.
        if path and not job.updating.is_set():
            self.withdraw(job, path)


class _BatchChecker:
    """Checks each batch of one copy, before it is released and sent. Copy thread."""

    def __init__(self, copier: Copier, job: CopyJob, batches: int) -> None:
        self._copier, self._job = copier, job
        self.unread = self._uncopied = batches  # batches still to be read, or copied

    def on_read(self, batch: Batch) -> None:
        self.unread -= 1
        instant = self._job.instant
        if instant is None or self._job.cancelled():
            return
        if path := instant.find_changed_in(batch):
            self._copier.withdraw(self._job, path)
        elif not self.unread:
            # A change may have been in progress, and not yet counted, when its tensor was checked.
            self._copier.check_all(self._job)

    def on_copied(self, batch: Batch) -> None:
        self._uncopied -= 1
        if not self._uncopied:
            self._job.all_copied.set()
        instant = self._job.instant
        if instant is None or self._job.cancelled():
            return
        if path := instant.find_miscopied(batch, self._job.staging.memory):
            self._copier.withdraw(self._job, path)
