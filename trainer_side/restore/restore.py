"""Restores the newest good checkpoint, read from the nearest copy, on any number of ranks.

1. All ranks run the same stages. Each stage ends with an agreement, so an error of one rank is raised on all.
2. Bytes that one tier cannot provide are read from another tier of any rank, or from the store. If no source has them
   intact, the next older checkpoint is tried. Every other error is raised: an older checkpoint does not help if the
   store is down or the shapes differ.
3. Objects that torch loads without custom code have their tensors read in place. After an exception these may hold
   bytes of any checkpoint: do not train on with this state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.errors import DamageError, HoldfastError, StateError, StoreError, StoreMissing
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.store.base import Store
from holdfast.telemetry.events import EventLog
from trainer_side.ranks.deadlines import HANGING_SHARE
from trainer_side.ranks.peers import Peers
from trainer_side.restore.choice import Candidate, SkippedCheckpoint, best_first
from trainer_side.restore.inventory import CandidateListing, StoreListing, list_tiers
from trainer_side.restore.restore_attempt import RestoreAttempt, Restored, RestoreJob, RestoreOptions
from trainer_side.restore.ring_slices import Fetch, fetch_ring_contents
from trainer_side.tiers.tier import Tier

_log = logging.getLogger("holdfast.restore")
_NEWEST = RestoreOptions()


def restore(
    state: Mapping[str, Any],
    store: Store | None,
    peers: Peers,
    *,
    events: EventLog | None,
    tiers: Sequence[Tier] = (),
    fetch: Fetch | None = None,
    options: RestoreOptions = _NEWEST,
) -> Restored | None:
    """Load the newest good checkpoint into the objects of `state`. Collective; training thread.

    `state`: Has the same names on every rank. `store`: The run's store, if any. `tiers`: This rank's tiers; other
    ranks may have others. `fetch`: Asks the stager for bytes in its ring; None without a stager.

    Returns:
        None, with `state` unchanged, on a new run: no checkpoint exists, or only slices of steps that are not known to
        be sealed on every rank (logged).

    Raises:
        DamageError: There are checkpoints but none is whole, or a tier cannot be listed. The message names each with
            its reason, and for a step that was once whole the places where its slices are missing.
        StateError: The checkpoint does not fit the state: names or shapes differ, or an object's `load_state_dict`
            refuses it; or batches must be skipped, and no object of any rank can skip them.
        StoreMissing: No checkpoint has the step `options.step`, or none has the metric of `options.best`.
        ConfigError: Neither the caller nor a manifest says which value of that metric is best.
        StoreError: The store failed, was too slow, or returned none of the manifests that it lists.
        PeerLost: A rank is gone.
    """
    begun = time.monotonic()
    # List the ring before the store, so that a step that becomes durable in between is in one of the two lists.
    ring_contents = None if peers.all_agree(fetch is None) else fetch_ring_contents(fetch, peers)
    seconds_max, step = options.seconds_max, options.step
    store_listing, store_error = StoreListing.open(
        store, peers, step=step, also=ring_contents.keys if ring_contents else (), seconds_max=seconds_max
    )
    ring = ring_contents.staged_slices(store_listing.stored, peers) if ring_contents else None
    places = [*tiers, ring] if ring else tiers
    tier_listing = list_tiers(places, peers, seconds_max=seconds_max * HANGING_SHARE)
    near = ring is not None and ring.near_on_all_ranks
    job = RestoreJob(state, store, peers, events, tier_listing, store_listing, options, near)
    job.report(tier_listing.problems, "other tiers, other ranks or the store may have it", event="damaged")
    wanted = [one for one in tier_listing.holders if step in (None, one.key.step)]
    listed = CandidateListing(wanted, store_listing, peers, options.set_aside, tier_listing.places)
    if store_error is not None and options.best is not None:
        raise store_error  # only manifests have metrics
    if store_error is not None:
        _proceed_without_store(job, store_error, listed.first())
    if step is not None:
        known = [CheckpointId(one.key.attempt, one.key.step) for one in tier_listing.holders]
        known += [] if store_listing.newest is None else [store_listing.newest]
        _check_step([*listed], step, max(known, default=None), job.where)
    if options.best is not None:
        ordered = iter(best_first([*listed], store_listing.stored, options.best, job.where))
    else:
        if (first := listed.first()) is not None:
            job.report(_drift_of_newer(listed.known_candidates(), first), "an older checkpoint is preferred")
        ordered = iter(listed)
    return _first_good(job, ordered, {"catalog": time.monotonic() - begun})


def _first_good(
    job: RestoreJob, ordered: Iterator[Candidate | SkippedCheckpoint], seconds: dict[str, float]
) -> Restored | None:
    branches, blocking = job.store_listing.branches, job.tier_listing.blocking_problems
    skipped: list[str] = []
    reported, lost, damaged = 0, False, False
    for candidate in ordered:
        if isinstance(candidate, SkippedCheckpoint):
            skipped.append(candidate.reason)
            lost = lost or candidate.was_complete
            damaged = damaged or (candidate.was_complete and not candidate.is_unreadable)
            continue
        if reported < len(skipped):
            job.report(skipped[reported:], f"trying {candidate.name} instead")
            reported = len(skipped)
        rewound = None if branches is None else branches.rewind_since(candidate.checkpoint)
        if rewound is not None and rewound.skipped and job.peers.all_agree(not job.options.can_skip):
            raise StateError(rewound.refusal_message())
        trial = RestoreAttempt(job, candidate, seconds, rewound)
        problem = trial.read()
        if problem is None:
            if candidate.drift:
                job.report(
                    [candidate.drift], f"{candidate.name} is restored all the same, as there is no other"
                )
            return trial.load(skipped, _checkpoint_before(ordered, candidate))
        skipped.append(f"{candidate.name}: {problem}")
        lost = damaged = True
    if lost or blocking:
        raise _no_usable_checkpoint_error(job, skipped, damaged=damaged or bool(blocking))
    job.report(skipped, "there is no other checkpoint, so the run starts at step 0")
    return None


def _no_usable_checkpoint_error(job: RestoreJob, skipped: Sequence[str], *, damaged: bool) -> HoldfastError:
    """Return the error if no checkpoint can be used. Not `damaged`: only the store prevents opening them."""
    reasons = "\n".join(f"  {reason}" for reason in (*skipped, *job.tier_listing.blocking_problems))
    counted = f"; none of {len(skipped)} checkpoints can be used" if skipped else ""
    kind = DamageError if damaged else StoreError
    return kind(
        f"{job.where}: there are checkpoints, and none is whole{counted}:\n{reasons}\nTheir remaining files are kept. "
        "Bring back the missing ones; or, to start over at step 0, make the Checkpointer with fresh=True, and do not "
        "call restore()"
    )


def _checkpoint_before(
    later: Iterator[Candidate | SkippedCheckpoint], candidate: Candidate
) -> CheckpointId | None:
    """Return the checkpoint to restore if `candidate` were set aside; `later` follows it in order. Collective."""
    try:
        for one in later:
            if isinstance(one, Candidate) and not one.checkpoint.is_set_aside([candidate.checkpoint]):
                return one.checkpoint
    except StoreError as error:
        # All bytes of `candidate` are read, so this error does not end the restore.
        _log.warning("restore: it is not known which checkpoint comes before %s: %s", candidate.name, error)
    return None


def _drift_of_newer(listed: Sequence[Candidate | SkippedCheckpoint], first: Candidate) -> list[str]:
    """Return the drift of checkpoints that are newer than the first candidate but ranked after it."""
    usable = [one for one in listed if isinstance(one, Candidate)]
    return [*dict.fromkeys(one.drift for one in usable if one.drift and one.checkpoint > first.checkpoint)]


def _proceed_without_store(job: RestoreJob, store_error: HoldfastError, newest: Candidate | None) -> None:
    """Raise if the store does not answer, unless the tiers have a whole checkpoint and `without_store` is set."""
    if newest is None:
        raise store_error
    if not job.options.without_store:
        raise StoreError(
            f"{store_error}. Nearer places (local tiers, the stager's ring) hold {newest.name} whole, but the store "
            f"may hold a newer one. To resume from {newest.name} all the same, set restore_without_store = true"
        ) from store_error
    job.report(
        [f"the store does not answer: {store_error}"], f"resuming from {newest.name}, the newest of the tiers"
    )


def _check_step(
    wanted: Sequence[Candidate | SkippedCheckpoint], step: int, newest: CheckpointId | None, where: str
) -> None:
    """Raise `StoreMissing` if the wanted step has no checkpoint, or none that was ever whole."""
    if not wanted:
        known = "there is no checkpoint at all" if newest is None else f"the newest is {newest.step}"
        raise StoreMissing(f"{where}: no checkpoint of step {step}; {known}")
    reasons = [one.reason for one in wanted if isinstance(one, SkippedCheckpoint) and not one.was_complete]
    if len(reasons) == len(wanted):
        raise StoreMissing(f"no checkpoint of step {step} is whole: {'; '.join(reasons)}")
