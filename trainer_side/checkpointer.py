"""The `Checkpointer`: what a training loop talks to, and who does what it asks.

    save(step) ─► Saver ──► Planner   what is copied, and to which place of the image; agrees with the other ranks
                    ├─────► Room      staging areas and slots of local tiers; waits for them, or declines
                    ├─────► Copier    the copy thread, and the gate that holds optimizers back
                    ├─────► Link      to the stager, on the MPI thread
                    └─────► TierSet   into local tiers, if there are any
    restore() ─► restore.py
    step(step) ─► appointments: whether it is time, also after a notice

No collective operation after start-up and restore. Every wait has a deadline.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, Self

import torch

from holdfast import supervised as diary
from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError, StateError
from holdfast.notices.notice import Notice
from holdfast.notices.sparing import NO_LIMIT, Ability
from holdfast.store import open_store
from holdfast.supervised import tell
from holdfast.telemetry.events import EventLog
from trainer_side.joining import join, open_tier_set
from trainer_side.ledger import Ledger, Stats
from trainer_side.notice.open_sources import open_watch
from trainer_side.pace.pacer import Pacer, chosen, open_pacer
from trainer_side.ranks.uncaught import end_by_exit_codes
from trainer_side.restore.candidate import Restored
from trainer_side.restore.restore import RestoreOptions, restore
from trainer_side.save.areas import Areas
from trainer_side.save.beginning import Beginning
from trainer_side.save.copier import Copier
from trainer_side.save.copy_engine import CopyEngine
from trainer_side.save.places import Room
from trainer_side.save.planner import Planner
from trainer_side.save.rank_context import RankContext
from trainer_side.save.saver import Saver
from trainer_side.state.split_kinds import refuse_split_objects
from trainer_side.transfer import TransferState

_log = logging.getLogger("holdfast.trainer")

_EXIT_SECONDS_MAX = 10.0  # for a script that ends without close()


class Checkpointer:
    """Takes checkpoints of a training run, and brings the newest one back.

    Every training rank of the MPI job makes one, with the same names and tensors; making it is collective (start-up).
    All methods belong to the training thread.

    Args:
        state: Names to objects with `state_dict()`/`load_state_dict()` (modules, optimizers, schedulers, samplers, what
            torch.distributed.checkpoint calls Stateful), tensors, plain values, or `PerRank(...)` around what differs
            per rank. Parameters of modules and tensors of optimizers, each under a name of its own, are taken to be the
            same on every rank; all else is saved as rank 0 has it.
        config: Settings; by default `HOLDFAST_*` in the environment and `holdfast.toml`.
        every: `step()` saves after every so many steps; 0 leaves it to `save()`; `"auto"`: it decides by what
            checkpoints cost (docs/interval.md). The same on every rank; by default the setting `every`.
        fresh: Begin the run anew although it may have checkpoints, and without `restore()`. Steps may be numbered from
            0 again: a checkpoint of a later job counts as newer whatever its step, and the older ones stay until
            retention removes them. A restarted script that says it begins anew each time.

    Attributes:
        restored: What `restore()` has brought back, and from where; None before, and on a new run.

    Raises:
        ConfigError: Wrong settings, or neither a stager in this MPI job nor local tiers.
        StoreError: The stager, or a job without one, cannot use the store; training has not begun.
        FencedError: Another stager writes this run.
        PeerLost: A rank or the stager did not come within `start_seconds_max`.
        StateError: Something in the state is split among the ranks by its class (FSDP1, DeepSpeed,
            `ZeroRedundancyOptimizer`, pipelines): what, where, and what to do instead.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        config: TrainerConfig | None = None,
        every: int | Literal["auto"] | None = None,
        fresh: bool = False,
    ) -> None:
        end_by_exit_codes()
        for name in list[object](state):
            if not (isinstance(name, str) and name and "/" not in name):
                raise StateError(f"names in the state are non-empty strings without '/', got {name!r}")
        self._state = dict(state)
        refuse_split_objects(self._state)
        self._config = config or TrainerConfig()
        fixed = chosen(every, self._config)
        self._every = fixed or 0
        self._link = join(self._config)
        self._events = EventLog(self._config.events, role="trainer", rank=self._link.rank)
        self._link.events = self._events
        self._ledger = Ledger()
        optimizers = [value for value in self._state.values() if isinstance(value, torch.optim.Optimizer)]
        self._pacer: Pacer | None = None
        if fixed is None:
            self._pacer = open_pacer(self._config, self._link, self._events, optimizers)
        self._copier = Copier(
            optimizers,
            self._link,
            ledger=self._ledger,
            events=self._events,
            seconds_max=self._config.copy_seconds_max,
        )
        self._tiers = open_tier_set(self._config, self._link, self._ledger, self._events)
        atexit.register(self._tiers.close, _EXIT_SECONDS_MAX)
        if not self._tiers.takes_steps:
            limit = self._config.host_bytes_max
            self._link.appointments.ability = Ability(area_bytes_max=NO_LIMIT if limit is None else limit)
        self._areas = Areas()
        self._engine = CopyEngine(device_bytes_max=self._config.device_bytes_max)
        self._beginning = Beginning(fresh=fresh, seconds_max=self._config.start_seconds_max)
        context = RankContext(
            self._config, self._link, self._tiers, self._ledger, self._events, self._beginning
        )
        room = Room(self._areas, self._engine, self._copier, context)
        planner = Planner(self._state, room, context)
        self._saver = Saver(self._state, planner, room, self._copier, context)
        self.restored: Restored | None = None
        self._closed = self._stepped = self._asked = False
        self._watching = open_watch(self._config, self._link.notice, rank=self._link.rank)
        diary.note("begins", True)

    @property
    def rank(self) -> int:
        """This rank, among the training ranks."""
        return self._link.rank

    @property
    def ranks(self) -> int:
        """Number of training ranks."""
        return self._link.ranks

    @property
    def staged_step(self) -> int:
        """Newest step known to be safe from the death of every training rank; -1 before the first."""
        return self._link.staged_step

    @property
    def durable_step(self) -> int:
        """Newest step known to be published in the store; -1 before the first."""
        return self._link.durable_step

    @property
    def kept_step(self) -> int:
        """Newest step of this job that every rank has sealed in the same local tier; -1 before the first."""
        return self._tiers.complete_step

    @property
    def notice(self) -> Notice | None:
        """What was last said of the end of a rank's machine, to whichever rank; None before. Changes in `step()` alone,
        at the same step on every rank: after it all of them may leave their loops together.
        """
        return self._link.appointments.notice

    @property
    def stats(self) -> Stats:
        """What this rank has done so far."""
        return self._ledger.stats

    def restore(self, *, step: int | None = None, may_lack: Collection[str] = ()) -> int:
        """Bring the state back from the newest good checkpoint. Collective; before the first step.

        Args:
            step: A certain step instead of the newest.
            may_lack: Names of the state that the checkpoint need not have: they stay as they are, and that is said. For
                one that was imported, or for what is new in the script; the next save has them.

        Returns:
            The number of the step to run next: 0 on a new run, otherwise one more than the saved step.

        Raises:
            ConfigError: `may_lack` names what is not in the state; or `fresh=True` was said.
            DamageError: There are checkpoints, and none is good; names each with its reason.
            StateError: The checkpoint holds other names or shapes than this state.
        """
        unknown = [name for name in may_lack if name not in self._state]
        if isinstance(may_lack, str) or unknown:
            raise ConfigError(
                f"may_lack: expected names of the state ({', '.join(self._state)}), got {may_lack!r}"
            )
        self._beginning.restored()
        store = open_store(self._link.store_url)
        self.restored = restore(
            self._state,
            store,
            self._link.peers,
            events=self._events,
            tiers=self._tiers.tiers,
            fetch=self._link.fetch,
            options=RestoreOptions(
                step=step,
                seconds_max=self._config.restore_seconds_max,
                without_store=self._config.restore_without_store,
                may_lack=frozenset(may_lack),
            ),
        )
        if self.restored is not None:
            self._tiers.restored((self.restored.attempt, self.restored.step), self.restored.whole_in)
            self._link.appointments.restored(self.restored.step)
            written = self.restored.manifest
            if written is not None and written.ranks != self.ranks and self.rank == 0:
                _log.warning(
                    "%d ranks have written step %d, and this job has %d: the whole state is resumed, not the same bits",
                    written.ranks,
                    written.step,
                    self.ranks,
                )
        tell("restored", step=-1 if self.restored is None else self.restored.step)
        return 0 if self.restored is None else self.restored.step + 1

    def step(self, step: int) -> bool:
        """Tell that step `step` (from 0) is done; saves when it is time. Returns whether a save was begun.

        It is time after `every` steps, and at the step that the stager, or without one rank 0, has named after a notice
        (docs/operations.md).
        """
        if not self._stepped:
            self._stepped = True
            tell("stepped", step=step)
        diary.note("step", step)
        appointments = self._link.appointments
        due = appointments.reach(step)
        every = appointments.every(self._every, step)
        timely = bool(every and (step + 1) % every == 0)
        if self._pacer is not None:
            timely = self._pacer.reach(step, lambda usual: appointments.every(usual, step))
        if due is not None:
            self._events.emit("appointed", {"save": due.save, "reason": due.reason}, step=step)
        wanted = timely or (due is not None and due.save)
        saved = wanted and self.save(step)
        if self._pacer is not None:
            self._pacer.stepped(step, due=wanted, saved=saved)
        return saved

    def save(self, step: int) -> bool:
        """Take a checkpoint of the state as it is now, after step `step`. Returns as soon as training may go on.

        With `on_full="skip"` it never waits for room. With `"wait"` it waits until fewer than `in_flight_max` steps are
        on their way to the ring, and each local tier has a free slot, at most `full_seconds_max` each time.

        Returns:
            False if the step is declined: all staging areas are still being sent, or the stager is lost and there are
            no local tiers. True if it was begun here, for the stager or for a tier. Another rank may still decline it,
            or this one, if its copy fails or numbers outgrow their room; `stats` counts it.

        Raises:
            StateError: The state cannot be saved: what and where; or the ranks' states differ.
            ConfigError: `host_bytes_max` is less than one staging area takes. At the first save: the run has
                checkpoints, and the script has neither called `restore()` nor said `fresh=True`.
            StoreError: At the first save without either: whether the run has checkpoints cannot be seen.
            PeerLost: While agreeing on a new layout a rank did not answer.
        """
        self._asked = True
        return self._saver.save(step)

    def wait_copied(self) -> None:
        """Wait until all of the last `save()` is copied, at most `copy_seconds_max`. Not collective.

        After it the state may be changed by any means until the next save. Only needed before changes that are not
        made in a step of an optimizer: weights of an average that are put in place, `load_state_dict`, clipping of
        weights, `optimizer.eval()` of one without a schedule.
        """
        self._copier.wait_copied()

    def changing(self) -> AbstractContextManager[None]:
        """For changes by hand: `with checkpointer.changing(): …` begins with `wait_copied()`.

        A `save()` inside takes the state as it is there, and returns when it is copied.
        """
        return self._copier.changing()

    def close(self) -> None:
        """Wait until what was accepted is durable (at most `close_seconds_max`), then leave. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._stepped and not self._asked and self.rank == 0 and self._pacer is None:
            _log.warning(
                "no checkpoint was taken: %s, and save() was not called; give Checkpointer(..., every=N), or call it",
                f"step() saves after every {self._every} steps, which were not reached"
                if self._every
                else "every=0",
            )
        if self._watching is not None:
            self._watching.close()
        if self._pacer is not None:
            self._pacer.close()
        self._copier.close()
        try:
            atexit.unregister(self._tiers.close)
            self._tiers.close(self._config.close_seconds_max)
            self._link.close(wait_for=TransferState.DURABLE, seconds_max=self._config.close_seconds_max)
        finally:
            if summary := self._ledger.summary():
                _log.warning("rank %d: %s", self.rank, summary)
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
